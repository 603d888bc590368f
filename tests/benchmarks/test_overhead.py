"""The calls that the loop may cost, as `benchmarks/overhead.py` counts them: exact, so any rise fails here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
