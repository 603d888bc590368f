"""The calls that the loop may cost, as `benchmarks/overhead.py` counts them: exact, so any rise fails here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def figures(repository: Path) -> dict[str, list[str]]:
    """The rows of the benchmark's tables, by their first cell."""
    command = [sys.executable, "benchmarks/overhead.py", "--parts", "calls", "--only", "raw,loopwright"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


def ratios(row: list[str]) -> tuple[float, float]:
    """Python calls of the tiny model, and all calls of the smallest one, over the raw loop's."""
    return float(row[1]), float(row[4])


def test_the_bare_trainer_makes_at_most_1_25_times_the_calls(figures: dict[str, list[str]]) -> None:
    assert max(ratios(figures["Loopwright Trainer, bare"])) <= 1.25


def test_the_trainer_with_its_defaults_makes_at_most_1_6_times_the_calls(figures: dict[str, list[str]]) -> None:
    assert max(ratios(figures["Loopwright Trainer, defaults + log"])) <= 1.6


def test_a_no_op_callback_adds_no_call(figures: dict[str, list[str]]) -> None:
    assert float(figures["a no-op callback"][0]) == 0.0


def test_one_log_adds_at_most_25_calls(figures: dict[str, list[str]]) -> None:
    assert 0 < float(figures["self.log(on_step, on_epoch)"][0]) <= 25


def _calls_of_a_step(benchmarks: str) -> dict[str, tuple[float, float]]:
    """Python calls and all calls per optimizer step of four batches: DDP by hand, and the Trainer."""
    sys.path.insert(0, benchmarks)
    try:
        from ddp import WORK
        from ddp_loops import run_hand_written, run_trainer_ddp
        from ticks import WARM_STEPS, CallCounter
    finally:
        sys.path.remove(benchmarks)
    found = {}
    for run in (run_hand_written, run_trainer_ddp):
        counter = CallCounter(WORK["small"].accumulate, steps=50)
        run(WORK["small"], counter, WARM_STEPS + 52)
        found[run.__name__] = (counter.python_calls(), counter.all_calls())
    return found


def test_on_two_processes_the_trainer_makes_at_most_1_25_times_the_calls_of_ddp_by_hand(
    two_processes: Callable[..., list[Any]], repository: Path
) -> None:
    for found in two_processes(_calls_of_a_step, str(repository / "benchmarks")):
        hand, trainer = found["run_hand_written"], found["run_trainer_ddp"]
        assert trainer[0] <= 1.25 * hand[0]
        assert trainer[1] <= 1.2 * hand[1]
