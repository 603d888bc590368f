"""Failures that end processes: what the others say, and with which exit code they end. Each on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .failing import SCRIPT, SECONDS, Ended, ended, start

FATAL = {
    "no error in 1, which only announces one": ("adopted", 1),
    "error in 1": ("error", 1),
    "error in 0": ("error", 0),
    "exit of 0": ("exit", 0),
    "kill of 1": ("kill", 1),
    "kill of 0": ("kill", 0),
    "kill of 1 in a message": ("kill in memory", 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All of them at the same time: what takes long is waiting."""
    folder = tmp_path_factory.mktemp("fatal")
    started = {name: start("fatal", kind, str(index), count=2, folder=folder) for name, (kind, index) in FATAL.items()}
    return {name: ended(processes) for name, processes in started.items()}


@pytest.mark.parametrize("index", [0, 1])
def test_an_uncaught_exception_is_shown_by_the_other_process(runs: dict[str, Ended], index: int) -> None:
    run = runs[f"error in {index}"]
    assert run.codes == [1, 1]
    assert run.errors[index].count("ValueError: boom") == 1
    assert "PeerFailedError" not in run.errors[index]
    shown = run.errors[1 - index]
    assert f"PeerFailedError: process {index} failed first, at training_step, step 2, outside any collective" in shown
    assert f"Process {1 - index} was in 'gather' with it." in shown
    assert 'raise ValueError("boom")' in shown  # the other's traceback


def test_an_exit_keeps_its_code_and_ends_the_other(runs: dict[str, Ended]) -> None:
    """B110, without a Trainer."""
    run = runs["exit of 0"]
    assert run.codes == [3, 1]
    assert "Its script has ended, or it has left the group: process 0." in run.errors[1]
    assert "process 0: its script has ended, or it has left the group, at training_step, step 2" in run.errors[1]


def test_a_killed_process_is_named_by_who_lives(runs: dict[str, Ended]) -> None:
    run = runs["kill of 1"]
    assert run.codes == [1, -9]
    assert "process 0 lost its connection to another process in 'gather'. No answer from process 1" in run.errors[0]
    assert "process 0: training_step, step 2, in 'gather'" in run.errors[0]
    assert "failed first" not in run.errors[0]


def test_a_killed_process_is_named_by_who_waits_for_its_message(runs: dict[str, Ended]) -> None:
    run = runs["kill of 1 in a message"]
    assert run.codes == [1, -9]
    assert "process 0 lost its connection to another process in 'agree'. No answer from process 1" in run.errors[0]


def test_when_the_store_dies_with_its_process_that_is_all_that_is_said(runs: dict[str, Ended]) -> None:
    run = runs["kill of 0"]
    assert run.codes == [-9, 1]
    assert "process 1 lost its connection to another process in 'gather'. The store" in run.errors[1]
    assert "process 0 or the launcher, is gone" in run.errors[1]


def test_a_process_that_nobody_wakes_is_ended_by_its_watch(runs: dict[str, Ended]) -> None:
    """A group that the script made itself: its connections are not known, and the failed process keeps them open."""
    run = runs["no error in 1, which only announces one"]
    assert run.codes == [1, 0]
    assert "Loopwright ends process 0: it has not come to its end 1" in run.errors[0]
    assert "process 1 failed first, at training_step, step 2, outside any collective: ValueError: boom" in run.errors[0]
    assert "process 0: training_step, step 2, in 'gather'" in run.errors[0]
    assert "dist.all_reduce(total)" in run.errors[0]  # its own stack


def test_under_torchrun_the_first_cause_is_on_the_screen(tmp_path: Path) -> None:
    """B65, without a Trainer."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "fatal", "error", "1"], cwd=tmp_path, text=True, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert "[rank1]: ValueError: boom" in done.stderr
