"""Trainings that one of two processes fails in, or is asked to end in: what the screen says, and who ends how."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.main import main

from ..distributed import failing
from ..distributed.failing import SECONDS
from ..nursery import Child, nursery
from ..ports import free_port

SCRIPT = Path(__file__).parent / "failing_training.py"
LAUNCH = ["launch", "--cpu", "--num_processes", "2"]


@dataclass
class Run:
    """Processes without an agent, so that nobody but they themselves ends them; process 0 holds the store."""

    processes: list[Child]
    folder: Path

    def end(self) -> Ended:
        done = failing.ended(self.processes)
        notes = [self.folder / f"events-{index}.json" for index in range(2)]
        return Ended(done.codes, done.errors, [json.loads(note.read_text()) if note.exists() else {} for note in notes])


@dataclass(frozen=True)
class Ended:
    """How a run's processes ended, process 0 first."""

    codes: list[int]
    errors: list[str]
    events: list[dict[str, Any]]

    def seen(self, index: int) -> list[str]:
        return self.events[index].get("seen", [])


def start(folder: Path, kind: str, index: int) -> Run:
    folder.mkdir()
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(2):
        variables = {key: str(value) for key, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        environment = os.environ | variables | {"LOOPWRIGHT_USE_CPU": "1"}
        processes.append(nursery().start(SCRIPT, kind, str(index), env=environment, cwd=folder))
    return Run(processes, folder)


FAILURES = {
    "step": 1, "callback": 0, "data": 0, "exit": 0, "keyboard": 1, "kill": 1, "hang": 1, "sigterm": 1, "validation": 0,
    "leave": 1,
}  # fmt: skip


@pytest.fixture
def ended(tmp_path: Path) -> Callable[[str], Ended]:
    """Lets a kind of training come to its end."""
    return lambda kind: start(tmp_path / kind, kind, FAILURES[kind]).end()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("step", "training_step, step 3, outside any collective"),
        pytest.param("callback", "training_step, step", marks=pytest.mark.slow),
        pytest.param("data", "train, step", marks=pytest.mark.slow),
    ],
)
def test_an_exception_ends_both_and_is_shown_by_both(ended: Callable[[str], Ended], kind: str, place: str) -> None:
    """B65, with a Trainer."""
    run, chosen = ended(kind), FAILURES[kind]
    assert run.codes == [1, 1]
    cause = f"ValueError: boom in the {kind}"
    assert cause in run.errors[chosen]
    assert "PeerFailedError" not in run.errors[chosen]
    assert f"PeerFailedError: process {chosen} failed first, at {place}" in run.errors[1 - chosen]
    assert cause in run.errors[1 - chosen]
    assert run.seen(chosen) == ["exception ValueError", "fit_end", "teardown"]
    assert run.seen(1 - chosen) == ["exception PeerFailedError", "fit_end", "teardown"]


def test_a_backward_pass_that_one_process_leaves_out(ended: Callable[[str], Ended]) -> None:
    """In manual optimization, where only the processes themselves know which backward passes follow."""
    begin = time.monotonic()
    run = ended("leave")
    assert time.monotonic() - begin < 40  # and not the time-out of 60 s
    assert run.codes == [1, 1]
    said = "process 1 left its training_step before a backward pass in which process 0 waits for it: it is in"
    assert f"DistributedError: {said} 'agree at a step's end' after 3 backward" in run.errors[1].replace('"', "'")
    assert "PeerFailedError: process 1 failed first, at training_step, step 3, in " in run.errors[0]
    assert said in run.errors[0]
    assert [run.seen(index)[0] for index in range(2)] == ["exception PeerFailedError", "exception DistributedError"]


@pytest.mark.slow
def test_an_exit_in_a_callback_keeps_its_code_and_the_other_names_the_hook(ended: Callable[[str], Ended]) -> None:
    """B110"""
    run = ended("exit")
    assert run.codes == [3, 1]
    assert "PeerFailedError: process 0 failed first, at " in run.errors[1]
    assert "SystemExit: 3" in run.errors[1]
    assert "on_step" in run.errors[1]
    assert run.seen(0) == ["exception SystemExit", "fit_end", "teardown"]


@pytest.mark.slow
def test_a_keyboard_interrupt_in_one_process_ends_both(ended: Callable[[str], Ended]) -> None:
    """B110"""
    run = ended("keyboard")
    assert run.codes[0] == 1
    assert run.codes[1] in (-signal.SIGINT, 130, 1)
    assert "PeerFailedError: process 1 failed first" in run.errors[0]
    assert "KeyboardInterrupt" in run.errors[0]
    assert run.seen(1) == ["exception KeyboardInterrupt", "fit_end", "teardown"]


def test_a_killed_process_ends_the_other(ended: Callable[[str], Ended]) -> None:
    run = ended("kill")
    assert run.codes == [1, -signal.SIGKILL]
    assert "PeerFailedError: process 0 lost its connection to another process" in run.errors[0]
    assert "No answer from process 1" in run.errors[0]
    assert run.seen(0) == ["exception PeerFailedError", "fit_end", "teardown"]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_place(ended: Callable[[str], Ended]) -> None:
    run = ended("hang")
    assert run.codes == [1, 1]
    assert "CollectiveTimeoutError" in run.errors[0]
    assert "process 1" in run.errors[0]
    assert "time.sleep(120.0)" in run.errors[0]  # its stack
    assert "Loopwright ends process 1" in run.errors[1]


def test_sigterm_to_one_process_ends_both_at_the_same_step(ended: Callable[[str], Ended]) -> None:
    run = ended("sigterm")
    assert run.codes == [143, 143]
    assert [each["step"] for each in run.events] == [3, 3] or [each["step"] for each in run.events] == [4, 4]
    assert run.seen(0) == run.seen(1) == ["fit_end", "teardown"]
    assert not any("Traceback" in error for error in run.errors)


@pytest.mark.slow
def test_sigterm_in_validation_ends_both_after_it(ended: Callable[[str], Ended]) -> None:
    run = ended("validation")
    assert run.codes == [143, 143]
    assert run.events[0] == run.events[1]
    assert run.seen(0) == ["fit_end", "teardown"]


def test_the_launcher_names_the_first_cause(capfd: pytest.CaptureFixture[str]) -> None:
    """B65"""
    assert main([*LAUNCH, str(SCRIPT), "step", "1"]) == 1
    said = capfd.readouterr().err
    assert "ValueError: boom in the step" in said
    assert "process 1 of 2 failed first" in said


def test_ctrl_c_ends_launcher_and_processes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "loopwright", *LAUNCH, str(SCRIPT), "interrupt", "1"], cwd=tmp_path,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as launcher:  # fmt: skip
        try:
            deadline = time.monotonic() + SECONDS
            while not (tmp_path / "is-training").exists():
                assert launcher.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
            launcher.communicate(timeout=SECONDS)
            assert launcher.returncode == 130
            with pytest.raises(ProcessLookupError, match="No such process"):
                os.killpg(launcher.pid, 0)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_script_that_starts_itself_fails_with_its_child(tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "own-step", "1"], cwd=tmp_path, text=True, capture_output=True, timeout=SECONDS,
        env=variables | {"LOOPWRIGHT_USE_CPU": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: boom in the step" in done.stderr
    assert "PeerFailedError: process 1 failed first, at training_step" in done.stderr
