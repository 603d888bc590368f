"""FP8 under `loopwright launch`: what reaches the script, against Accelerate's own launcher, and what a script does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from loopwright.cli.launch import settings_of
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import read_launch
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fp8_recipes import AORecipeKwargs, FP8Recipe, MSAMPRecipeKwargs, TERecipeKwargs

NEEDS_ACCELERATE = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
TE_FILE = """
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
mixed_precision: fp8
fp8_config:
  backend: TE
  use_autocast_during_eval: true
  margin: 2
  interval: 3
  fp8_format: E4M3
  amax_history_len: 16
  amax_compute_algo: max
  override_linear_precision: [true, false, true]
"""
LONG_NAMES = """
distributed_type: MULTI_CPU
num_processes: 2
mixed_precision: fp8
fp8_config: {backend: TE, amax_history_length: 16, amax_compute_algorithm: max, optimization_level: O1}
"""
DEFAULTS = {
    "FP8_MARGIN": "0", "FP8_INTERVAL": "1", "FP8_FORMAT": "HYBRID", "FP8_AMAX_HISTORY_LEN": "1024",
    "FP8_AMAX_COMPUTE_ALGO": "most_recent", "FP8_OPT_LEVEL": "O2", "FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "FP8_OVERRIDE_FPROP": "False", "FP8_OVERRIDE_DGRAD": "False", "FP8_OVERRIDE_WGRAD": "False",
    "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "True", "FP8_PAD_INNER_DIM": "True",
}  # fmt: skip
"""What Accelerate's launcher passes on although nobody said it."""


@pytest.fixture(autouse=True)
def no_launch_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


def ours(*arguments: str) -> dict[str, str]:
    """What the processes of a launch learn of FP8."""
    told = dict(settings_of(merged_options(read_launch([*arguments, "script.py"]).options)).environment)
    return {name.removeprefix("ACCELERATE_"): text for name, text in told.items() if "FP8_" in name}


def theirs(*arguments: str) -> dict[str, str]:
    """The same of Accelerate's launcher."""
    launch = importlib.import_module("accelerate.commands.launch")
    utils = importlib.import_module("accelerate.utils.launch")
    args, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--main_process_port=0", *arguments, "script.py"])
    )
    told = dict(utils.prepare_multi_gpu_env(args))
    return {name.removeprefix("ACCELERATE_"): text for name, text in told.items() if name.startswith("ACCELERATE_FP8_")}


def meant(environment: dict[str, str]) -> dict[str, str]:
    """With one spelling of true and false: Accelerate has two."""
    claims = {"true": "1", "false": "0"}
    return {name: claims.get(text.lower(), text.lower()) for name, text in environment.items()}


@NEEDS_ACCELERATE
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (TE_FILE, []),
        (TE_FILE, ["--fp8_margin=5", "--fp8_override_linear_precision=false,true,false"]),
        (None, ["--mixed_precision=fp8", "--fp8_backend=ao", "--fp8_pad_inner_dim=false"]),
        (None, ["--mixed_precision=fp8", "--fp8_backend=msamp", "--fp8_opt_level=O1"]),
        (None, ["--mixed_precision=fp8", "--fp8_backend=te", "--fp8_use_autocast_during_eval", "--fp8_format=E5M2"]),
    ],
    ids=["te file", "flags over file", "ao", "msamp", "te"],
)
def test_the_processes_learn_what_accelerates_launcher_tells_them(text: str | None, flags: Sequence[str]) -> None:
    Path("launch.yaml").write_text(text or "")
    arguments = [*([] if text is None else ["--config_file=launch.yaml"]), *flags]
    if text is None:
        arguments += ["--num_processes=2", "--cpu"]
    found, wanted = ours(*arguments), theirs(*arguments)
    assert meant(found) == meant({name: text for name, text in wanted.items() if name in found})
    unsaid = {name: text for name, text in wanted.items() if name not in found}
    assert meant(unsaid) == meant({name: DEFAULTS[name] for name in unsaid})


def test_the_names_that_accelerates_questions_write_are_understood() -> None:
    """`accelerate config` writes these, and its launcher then loses them."""
    Path("launch.yaml").write_text(LONG_NAMES)
    found = ours("--config_file=launch.yaml")
    assert found == {
        "FP8_BACKEND": "te", "FP8_AMAX_HISTORY_LEN": "16", "FP8_AMAX_COMPUTE_ALGO": "max", "FP8_OPT_LEVEL": "O1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [
        (["--config_file=launch.yaml"], TERecipeKwargs(
            use_autocast_during_eval=True, margin=2, interval=3, fp8_format="E4M3", amax_history_len=16,
            amax_compute_algo="max", override_linear_precision=(True, False, True),
        )),
        (["--mixed_precision=fp8", "--fp8_backend=msamp", "--fp8_opt_level=O1"], MSAMPRecipeKwargs(opt_level="O1")),
        (
            ["--mixed_precision=fp8", "--fp8_backend=ao", "--fp8_pad_inner_dim=false"],
            AORecipeKwargs(pad_inner_dim=False),
        ),
    ],
    ids=["te", "msamp", "ao"],
)  # fmt: skip
def test_the_recipes_read_what_the_launcher_says(
    arguments: Sequence[str],
    recipe: FP8Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("launch.yaml").write_text(TE_FILE)
    for name, text in ours(*arguments).items():
        monkeypatch.setenv(f"ACCELERATE_{name}", text)
    assert type(recipe)() == recipe


class TestTheSection:
    def test_does_not_count_with_another_precision(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("launch.yaml").write_text(TE_FILE)
        assert ours("--config_file=launch.yaml", "--mixed_precision=bf16") == {}
        assert "fp8_config is not used: it belongs to --mixed_precision fp8" in capsys.readouterr().err
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert ours("--config_file=launch.yaml") == {}

    def test_counts_where_a_variable_says_fp8(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("launch.yaml").write_text(TE_FILE.replace("mixed_precision: fp8", "mixed_precision: bf16"))
        assert ours("--config_file=launch.yaml") == {}
        monkeypatch.setenv("LOOPWRIGHT_MIXED_PRECISION", "fp8")
        assert ours("--config_file=launch.yaml")["FP8_MARGIN"] == "2"

    def test_a_variable_wins_over_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("launch.yaml").write_text(TE_FILE)
        monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_FPROP", "false")
        found = ours("--config_file=launch.yaml")
        assert not {name for name in found if "OVERRIDE" in name}  # the processes inherit it
        assert found["FP8_INTERVAL"] == "3"

    def test_it_goes_with_any_strategy(self) -> None:
        Path("launch.yaml").write_text(TE_FILE)
        assert ours("--config_file=launch.yaml", "--use_fsdp")["FP8_BACKEND"] == "te"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fp8_backend=te"], r"--fp8_backend belongs to --mixed_precision fp8, which is not given"),
        (["--mixed_precision=bf16", "--fp8_margin=1"], r"--fp8_margin belongs to --mixed_precision fp8"),
        (["--mixed_precision=fp8", "--fp8_backend=tea"], r"--fp8_backend: got 'tea'\. Did you mean 'te'\?"),
        (["--mixed_precision=fp8", "--fp8_override_linear_precision=true,false"], r"Expected 3 words, true or false"),
        (["--mixed_precision=fp8", "--fp8_override_linear_precision=1,2,3"], r"got '1,2,3'\. Expected 3 words"),
    ],
)
def test_bad_options(arguments: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ours(*arguments)


SCRIPT = """
import json
import torch
from loopwright import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(16, 32)).square().mean())
optimizer.step()
if accelerator.is_main_process:
    print(json.dumps([accelerator.mixed_precision, accelerator.num_processes, type(accelerator.strategy).__name__]))
"""


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is missing")
@pytest.mark.slow
def test_a_script_of_two_processes_computes_in_fp8() -> None:
    Path("script.py").write_text(SCRIPT)
    flags = ["--cpu", "--num_processes=2", "--mixed_precision=fp8", "--fp8_backend=ao"]
    run = subprocess.run(
        [sys.executable, "-m", "loopwright", "launch", *flags, "script.py"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == ["fp8", 2, "FP8Strategy"]
