"""Compiling under `loopwright launch`: what reaches the script, against Accelerate's own launcher, and what it does."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from loopwright.cli.launch import settings_of
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import extract_launch, read_launch
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.dynamo_plugin import TorchDynamoPlugin

NEEDS_ACCELERATE = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
FILE = """
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
mixed_precision: bf16
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: reduce-overhead
  dynamo_use_dynamic: true
  dynamo_use_fullgraph: false
  dynamo_use_regional_compilation: true
"""
DEFAULTS = {
    "BACKEND": "no", "MODE": "default", "USE_FULLGRAPH": "0", "USE_DYNAMIC": "0", "USE_REGIONAL_COMPILATION": "0",
}  # fmt: skip
"""What Accelerate's launcher passes on although nobody said it."""


@pytest.fixture(autouse=True)
def no_launch_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


def meant(environment: dict[str, str]) -> dict[str, str]:
    """What is told of compiling, with one spelling of each word."""
    claims, start = {"true": "1", "false": "0"}, "ACCELERATE_DYNAMO_"
    found = {name.removeprefix(start): text.lower() for name, text in environment.items() if name.startswith(start)}
    return {name: claims.get(text, text) for name, text in found.items()}


def ours(*arguments: str) -> dict[str, str]:
    """What the processes of a launch learn of compiling."""
    return meant(dict(settings_of(merged_options(read_launch([*arguments, "script.py"]).options)).environment))


def theirs(*arguments: str) -> dict[str, str]:
    """The same of Accelerate's launcher."""
    launch = importlib.import_module("accelerate.commands.launch")
    utils = importlib.import_module("accelerate.utils.launch")
    args, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--main_process_port=0", *arguments, "script.py"])
    )
    return meant(dict(utils.prepare_multi_gpu_env(args)))


@NEEDS_ACCELERATE
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (FILE, []),
        (FILE, ["--dynamo_mode=max-autotune", "--dynamo_use_fullgraph"]),
        (FILE.replace("    dynamo_", "    "), ["--dynamo_backend=aot_eager"]),
        (FILE.replace("dynamo_mode: reduce-overhead", "dynamo_mode: default"), []),
        (None, ["--dynamo_backend=eager", "--dynamo_use_regional_compilation"]),
        (None, ["--dynamo_backend=no"]),
    ],
)
def test_the_processes_learn_what_accelerates_launcher_tells_them(text: str | None, flags: Sequence[str]) -> None:
    Path("launch.yaml").write_text(text or "")
    arguments = [*([] if text is None else ["--config_file=launch.yaml"]), *flags]
    if text is None:
        arguments += ["--num_processes=2", "--cpu"]
    found, wanted = ours(*arguments), theirs(*arguments)
    assert found.items() <= wanted.items()
    assert {name: text for name, text in wanted.items() if name not in found}.items() <= DEFAULTS.items()


@pytest.mark.parametrize(
    ("text", "backend"),
    [("dynamo_backend: INDUCTOR", "inductor"), ("dynamo_backend: 'NO'", None), ("dynamo_config: {backend: no}", None)],
)
def test_the_key_of_old_files(text: str, backend: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("launch.yaml").write_text(f"distributed_type: NO\nuse_cpu: true\n{text}\n")
    assert ours("--config_file=launch.yaml") == ({} if backend is None else {"BACKEND": backend})
    assert "not used" not in capsys.readouterr().err


def test_the_plugin_reads_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("launch.yaml").write_text(FILE)
    for name, text in ours("--config_file=launch.yaml").items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", text)
    assert TorchDynamoPlugin() == TorchDynamoPlugin(
        backend="inductor", mode="reduce-overhead", dynamic=True, fullgraph=False, use_regional_compilation=True
    )


def test_a_variable_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("launch.yaml").write_text(FILE)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    found = ours("--config_file=launch.yaml", "--use_fsdp")
    assert "BACKEND" not in found  # the processes inherit it
    assert found["MODE"] == "reduce-overhead"
    monkeypatch.setenv("LOOPWRIGHT_DYNAMO_BACKEND", "no")
    assert ours("--config_file=launch.yaml") == {}
    assert "dynamo_config is not used: it belongs to --dynamo_backend" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dynamo_mode=default"], r"--dynamo_mode belongs to --dynamo_backend, which is not given"),
        (["--dynamo_backend=no", "--dynamo_use_dynamic"], r"--dynamo_use_dynamic belongs to --dynamo_backend"),
        (["--dynamo_backend=inducter"], r"--dynamo_backend: got 'inducter'\. Did you mean 'inductor'\?"),
        (["--dynamo_backend=eager", "--dynamo_mode=fast"], r"--dynamo_mode: got 'fast'\. Accepted: default"),
    ],
)
def test_bad_options(arguments: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ours(*arguments)


def test_files_of_runs_say_it_themselves() -> None:
    with pytest.raises(ConfigError, match=r"--dynamo_backend is for scripts\. A file says it itself: --trainer\.comp"):
        extract_launch(["run.yaml", "--dynamo_backend=inductor"])


SCRIPT = """
import json
import torch
from loopwright import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
names = list(model.state_dict())
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for size in (2, 3):
    accelerator.backward(model(torch.ones(size, 8)).square().mean())
    optimizer.step()
if accelerator.is_main_process:
    from torch._dynamo.utils import counters
    unwrapped = accelerator.unwrap_model(model)
    print(json.dumps([
        accelerator.num_processes, counters["stats"]["unique_graphs"], list(accelerator.recompilations.values()),
        list(unwrapped.state_dict()) == names,
    ]))
"""


@pytest.mark.slow
def test_a_script_of_two_processes_is_compiled() -> None:
    Path("script.py").write_text(SCRIPT)
    flags = ["--cpu", "--num_processes=2", "--dynamo_backend=eager"]
    run = subprocess.run(
        [sys.executable, "-m", "loopwright", "launch", *flags, "script.py"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [2, 2, [1], True]
