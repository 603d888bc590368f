"""Jobs of a real SLURM that are requeued: each goes on where it was, and ends as one that was left alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "slurm_script.py"
JOB = """#!/bin/bash
#SBATCH --requeue --overcommit --ntasks={tasks} --time=10 --open-mode=append --output={name}.out
export OMP_NUM_THREADS=1
srun --overcommit {python} {script} {name} {seconds}
"""


def why_not() -> str:
    """Why no job can be submitted here; empty where one can."""
    if shutil.which("sbatch") is None:
        return "needs SLURM: no 'sbatch' on PATH"
    done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60, check=False)
    return "" if " is UP" in done.stdout else f"needs a running slurmctld: {done.stdout}{done.stderr}"


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def submit(name: str, tasks: int, seconds: float) -> str:
    text = JOB.format(name=name, tasks=tasks, seconds=seconds, python=sys.executable, script=SCRIPT)
    Path(f"{name}.sh").write_text(text)
    return slurm("sbatch", "--parsable", f"{name}.sh").strip()


def state_of(job: str) -> str:
    (state,) = re.findall(r"JobState=(\w+)", slurm("scontrol", "show", "job", job, "--oneliner"))
    return str(state)


def wait_until(holds: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, Path(f"{name}.out").read_text()
        time.sleep(0.2)


def rows(name: str) -> list[str]:
    path = Path("runs", name, "metrics.jsonl")
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "disturb", "signal"),
    [
        (1, ("scancel", "--signal=USR1"), "SIGUSR1"),  # as `sbatch --signal=USR1@120` sends it
        (2, ("scancel", "--signal=USR1"), "SIGUSR1"),
        (1, ("scontrol", "requeue"), "SIGTERM"),  # as SLURM does for a job of higher priority
    ],
)
def test_a_requeued_job_ends_as_one_that_was_left_alone(
    tmp_path: Path, tasks: int, disturb: tuple[str, ...], signal: str
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    jobs = {"whole": submit("whole", tasks, 0.0), "cut": submit("cut", tasks, 0.1)}
    try:
        wait_until(lambda: len(rows("cut")) >= 10, "cut")
        slurm(*disturb, jobs["cut"])
        wait_until(lambda: state_of(jobs["cut"]) == "PENDING", "cut")
        slurm("scontrol", "update", f"JobId={jobs['cut']}", "StartTime=now")  # it would wait for two minutes
        for name, job in jobs.items():
            wait_until(lambda job=job: state_of(job) in ("COMPLETED", "FAILED"), name)  # type: ignore[misc]
    finally:
        slurm("scancel", *jobs.values())
    first, second = map(json.loads, Path("cut.legs").read_text().splitlines())
    stopped_at, end = first["to"], 160 // tasks
    assert first == {"restart": 0, "from": None, "to": stopped_at, "by": signal}
    assert second == {"restart": 1, "from": stopped_at, "to": end, "by": None}
    whole, cut = load_file("whole.safetensors"), load_file("cut.safetensors")
    assert all(torch.equal(whole[name], cut[name]) for name in whole.keys() | cut.keys())
    assert rows("cut") == rows("whole")
    assert len(rows("whole")) == end
