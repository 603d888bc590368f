# Each target sets up .venv by itself, on a machine that has nothing but Python and make.
#   make demo       train on real data, with a progress bar, validation, a TensorBoard log and a checkpoint
#   make test       the tests that need no GPU and no patience      make test-all   those that take long as well
#   make test-xla   those of torch_xla, with a torch of their own (7 GB, 20 minutes to install the first time)
#   make lint       ruff, and mypy over the sources                 make types      mypy against the installed wheel
#   make bench      what a step costs beside the raw loop           make clean      remove all that these made
#   make soak       kill a training at random moments, resume it, and see that nothing is lost

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
ROOMS  := trainer callbacks trackers inference strategies checkpoint data distributed recipes

.PHONY: demo test test-all compiled test-xla lint types links bench soak clean
.SECONDARY:

demo: $(VENV)/.installed-recipes
	$(BIN)/loopwright fit recipes/digits/digits.yaml
	$(BIN)/loopwright test recipes/digits/digits.yaml \
		--weights "$$(ls -t runs/digits*/checkpoints/best*.safetensors | head -n 1)"

# Two tests at a time: many of them start two processes, or wait for others. Who is done first takes from the other.
TOGETHER := -n 2 --dist worksteal

test: $(VENV)/.installed-dev compiled
	$(BIN)/pytest $(TOGETHER) -m "not slow and not gpu" --ignore=tests/xla

test-all: $(VENV)/.installed-dev compiled
	$(BIN)/pytest $(TOGETHER) -m "not gpu" --ignore=tests/xla

# Tests start some hundred processes, each of which would compile the package anew where Python is told not to write
# what it compiled (PYTHONDONTWRITEBYTECODE), for a second of CPU.
compiled: $(VENV)/.installed-dev
	@$(BIN)/python -m compileall -q loopwright $(ROOMS) tests

# torch_xla is built for another torch than that of constraints.txt; all else has the same versions. SPMD belongs to a
# whole process: its tests run in one of their own, on two virtual devices.
XLA := .venv-xla
test-xla: $(XLA)/.installed
	PJRT_DEVICE=CPU $(XLA)/bin/pytest tests/xla
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 $(XLA)/bin/pytest tests/xla/test_spmd.py

$(XLA)/.installed: pyproject.toml constraints.txt
	@$(XLA)/bin/python -c "" 2>/dev/null || { echo "Creating $(XLA)"; $(PYTHON) -m venv --clear $(XLA); }
	@sed 's/^torch==.*/torch==2.9.0/' constraints.txt > $(XLA)/constraints.txt
	@echo "Installing loopwright[xla] into $(XLA) (7 GB, about 20 minutes the first time)"
	@$(XLA)/bin/python -m pip --disable-pip-version-check --quiet install -c $(XLA)/constraints.txt \
		-e '.[xla]' pytest pytest-timeout
	@touch $@

lint: $(VENV)/.installed-dev links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p loopwright

# As a user gets it: a wheel, unpacked beside nothing else, checked from a folder that holds no source.
types: $(VENV)/.installed-dev
	@set -e; root="$(CURDIR)"; python="$(abspath $(BIN))/python"; \
	folder=$$(mktemp -d); trap 'rm -rf "$$folder" "$$root/build"' EXIT; rm -rf build; \
	echo "Building a wheel and checking what it installs"; \
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir "$$folder" .; \
	$(PIP) install --no-deps --target "$$folder/site" "$$folder"/*.whl; \
	cp tests/style/consumer.py "$$folder"; cd "$$folder"; \
	MYPYPATH=site "$$python" -m mypy --config-file "$$root/pyproject.toml" -p loopwright; \
	PYTHONPATH=site "$$python" -m mypy --strict consumer.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/overhead.py

# KILLS: how many; 200 take about ten minutes on two cores.
KILLS ?= 200
soak: $(VENV)/.installed-recipes
	$(BIN)/python benchmarks/soak.py --kills $(KILLS)

# mypy sees the rooms under their import names: .dev/loopwright/trainer -> ../../trainer, ...
links:
	@mkdir -p .dev/loopwright
	@for room in $(ROOMS); do ln -sfn "../../$$room" ".dev/loopwright/$$room"; done
	@for file in loopwright/*; do ln -sfn "../../$$file" ".dev/$$file"; done
	@find .dev/loopwright -xtype l -delete

# What each set of extras is for; a stamp says that .venv holds it in the versions of constraints.txt.
EXTRAS_recipes := recipes
EXTRAS_dev     := test,lint
EXTRAS_bench   := recipes,bench

$(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Loopwright needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -c "" 2>/dev/null || { echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing loopwright[$(EXTRAS_$*)] into $(VENV), in the versions of constraints.txt (minutes, the first time)"
	@$(PIP) install -c constraints.txt --upgrade pip
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@touch $@ $(VENV)/.installed-recipes  # each set holds what the recipes need

clean:
	rm -rf $(VENV) $(XLA) .dev build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
