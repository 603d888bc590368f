"""`loopwright plan FILE.yaml --world-size 64 --device-memory 80GB`: what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from loopwright.cli.main import main

RUN = """
task:
  class_path: task.Line
  init_args: {width: 1000}
data:
  class_path: task.loaders
trainer:
  max_epochs: 2
  progress: false
  trackers: false
"""


def plan(project: Any, *flags: str) -> int:
    return main(["plan", str(project.write(RUN)), *flags])


def test_the_simplest_strategy_that_fits(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(project, "--world-size", "2", "--device-memory=1MB") == 0
    out = capsys.readouterr().out
    assert "8 steps" in out
    assert "Memory      of each of 2 processes, with 2 samples in a batch; a device has 1.00 MB" in out
    # 3001 weights; SGD keeps nothing.
    assert "* ddp " in out
    assert "12.00 kB   12.00 kB    0.00 kB" in out
    assert out.splitlines()[-1] == "Strategy    ddp is the simplest that fits"


def test_the_task_is_built_without_memory(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(project, "--world_size=8", "--task.init_args.width=10000000000") == 0  # 120 GB
    assert "120.00 GB" in capsys.readouterr().out


def test_a_task_that_reads_its_weights(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(project.write(RUN)), "--task=task.Talkative", "--world-size=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("weights sum to ")
    assert "Look at     the model was built with its memory: the task can't run on the meta device" in out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--world-size=0", "--world-size 0. Expected a number of processes, at least 1."),
        ("--world-size=many", "--world-size many. Expected a number of processes, at least 1."),
        ("--device-memory=80", "device_memory='80' has no unit. Expected such as '80GB'."),
        ("--device-memory=x", "device_memory='x'. Expected a number of bytes"),
    ],
)
def test_bad_options(project: Any, capsys: pytest.CaptureFixture[str], flag: str, message: str) -> None:
    assert plan(project, flag) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
