"""A script that was written for Accelerate runs here after its import lines are changed, and gives the same numbers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("accelerate_script.py")


def run(package: str, precision: str, steps: int) -> dict[str, Any]:
    """What the script prints."""
    command = [sys.executable, "-W", "error::UserWarning:loopwright", str(SCRIPT), package, precision, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_script_runs() -> None:
    """6 batches of 45 samples; in the third epoch 4 of them."""
    found = run("loopwright", "no", 4)
    assert found["syncs"] == "FFFTFT" + "FFFTFT" + "FFFT"
    assert (len(found["losses"]), len(found["norms"])) == (16, 5)
    assert [seen for seen, _ in found["metrics"]] == [45, 45, 45]
    assert found["type"] == "Sequential"
    assert not found["skipped"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(("precision", "steps"), [("no", 1), ("no", 4), ("bf16", 2)])
def test_the_numbers_are_accelerates(precision: str, steps: int) -> None:
    assert run("loopwright", precision, steps) == run("accelerate", precision, steps)
