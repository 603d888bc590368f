"""Processes that the launcher starts again go on with what they were doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.distributed.launched import Launch, find_launch

from ..trainer.tiny import Scalar, Watch, ones, trainer

SCRIPT = Path(__file__).with_name("restarted_script.py")


def launch(folder: Path, kill_at: int) -> str:
    command = [
        sys.executable, "-m", "loopwright", "launch", "--cpu", "--num_processes", "2", "--max_restarts", "1",
        str(SCRIPT), str(folder), str(kill_at),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_process_leads_to_a_restart_that_goes_on(tmp_path: Path) -> None:
    assert "resumed from None" in launch(tmp_path / "whole", kill_at=99)
    assert "resumed from 6" in launch(tmp_path / "killed", kill_at=6)
    whole, killed = (load_file(tmp_path / name / "end.safetensors") for name in ("whole", "killed"))
    assert all(whole[name].equal(killed[name]) for name in whole)
    rows = [next((tmp_path / name).glob("net-*/metrics.jsonl")).read_text() for name in ("whole", "killed")]
    assert rows[0] == rows[1]


def in_launch(monkeypatch: pytest.MonkeyPatch, name: str, restarts: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def broken_at(step: int) -> Watch:
    def batch_start(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if trainer.state.step == step:
            raise RuntimeError("the process fails here")

    return Watch(batch_start=batch_start)


def leg(*callbacks: Any, **options: Any) -> tuple[Scalar, Any]:
    task = Scalar()
    saver = ModelCheckpoint("1 step", save_on_exception=False)
    found = trainer(max_steps=6, callbacks=[saver, *callbacks], **options)
    found.fit(task, ones(10))
    return task, found


@pytest.mark.parametrize("options", [{}, {"name": "one"}])
def test_fit_goes_on_by_itself_in_a_restarted_process(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    in_launch(monkeypatch, "job", 0)
    with pytest.raises(RuntimeError, match="the process fails here"):
        leg(broken_at(4), **options)
    in_launch(monkeypatch, "job", 1)
    task, found = leg(**options)
    assert (found.resumed_step, found.state.step, task.value) == (4, 6, -6.0)
    found.fit(task, ones(10))  # a second one is a run of its own
    assert (found.resumed_step, task.value) == (None, -12.0)


def test_nothing_goes_on_in_another_launch_or_the_first_life(monkeypatch: pytest.MonkeyPatch) -> None:
    in_launch(monkeypatch, "job", 0)
    with pytest.raises(RuntimeError, match="the process fails here"):
        leg(broken_at(4))
    for name, restarts in (("job", 0), ("another", 1), ("none", 1)):
        in_launch(monkeypatch, name, restarts)
        assert leg()[1].resumed_step is None


def test_what_to_go_on_with_has_to_be_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    in_launch(monkeypatch, "job", 0)
    leg()
    leg()
    in_launch(monkeypatch, "job", 2)
    with pytest.raises(CheckpointError, match=r"restart 2\), and have saved 2 runs: .*give each Trainer a name="):
        leg()
    assert leg(name="one")[1].resumed_step is None


def test_a_launch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert find_launch() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's word for no name, which all launches share
    assert find_launch() is None
    in_launch(monkeypatch, "job", 3)
    assert find_launch() == Launch("job", 3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "often")
    with pytest.raises(ConfigError, match="TORCHELASTIC_RESTART_COUNT='often' is not an integer"):
        find_launch()
