"""A script that was written for Accelerate runs here after its import lines are changed, and gives the same numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("accelerate_script.py")


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def run(package: str, precision: str, steps: int, num_processes: int = 1) -> dict[str, Any]:
    """What the script prints."""
    launcher = [*LAUNCHER, str(num_processes)] if num_processes > 1 else []
    command = [sys.executable, "-W", "error::UserWarning:loopwright", *launcher]
    command += [str(SCRIPT), package, precision, str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
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
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_numbers_are_accelerates(precision: str, steps: int, num_processes: int) -> None:
    assert run("loopwright", precision, steps, num_processes) == run("accelerate", precision, steps, num_processes)


def test_the_script_runs_on_two_processes() -> None:
    """3 rounds of batches; in the third epoch 1 of them. The evaluations count each of the 45 samples once."""
    found = run("loopwright", "no", 2, num_processes=2)
    assert found["syncs"] == "FTT" + "FTT" + "T"
    assert (len(found["losses"]), len(found["norms"])) == (7, 5)
    assert [seen for seen, _ in found["metrics"]] == [45, 45]
    assert found["type"] == "Sequential"
