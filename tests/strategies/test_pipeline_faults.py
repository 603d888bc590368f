"""Pipelines of which one process fails, is killed or leaves: all end, and say which process, stage and error it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..distributed.failing import free_port

SCRIPT = Path(__file__).parent / "failing_pipeline.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT = 240.0
"""Seconds for all of it: four processes start slowly on a busy machine."""
ENDING = 30.0
"""Seconds from the first process that ends to the last."""


def run(folder: Path, kind: str, index: int, copies: int) -> tuple[list[int], list[str], float]:
    """The exit codes and errors of two processes for each pipeline, and the seconds from the first end to the last."""
    count = 2 * copies
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes, logs = [], [folder / f"{rank}.log" for rank in range(count)]
    for rank, log in enumerate(logs):
        own = {key: str(value) for key, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with log.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), kind, str(index), str(copies)],
                    env=os.environ | own | {"LOOPWRIGHT_USE_CPU": "1"}, cwd=folder, stdout=stream, stderr=stream,
                )
            )  # fmt: skip
    try:
        limit, ends = time.monotonic() + LIMIT, dict[int, float]()
        while len(ends) < count and time.monotonic() < limit:
            ends |= {i: time.monotonic() for i, p in enumerate(processes) if i not in ends and p.poll() is not None}
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    took = max(ends.values()) - min(ends.values()) if len(ends) == count else float("inf")
    return [process.returncode for process in processes], [log.read_text() for log in logs], took


@pytest.mark.parametrize(
    ("kind", "index", "copies", "error"),
    [
        ("kill", 3, 2, "No answer from process 3"),
        ("forward", 2, 2, r"boom in the forward\n.*raised in stage 0 of the 2"),
        ("forward", 1, 1, r"boom in the forward\n.*raised in stage 1 of the 2"),
        ("loss", 1, 2, r"boom in the loss\n.*raised in pipeline_loss, in the pro"),
        ("backward", 0, 2, r"boom in the backward\n.*backward pass of stage 0"),
        ("backward", 1, 1, r"boom in the backward\n.*backward pass of stage 1"),
        ("step", 3, 2, "ZeroDivisionError: boom in the step"),
        ("validation", 2, 2, "ZeroDivisionError: boom in the validation"),
        ("stop-inside", 3, 2, "TaskError: StopRun left a batch on its way"),
        ("skip-inside", 0, 1, "TaskError: SkipBatch left a batch on its way"),
        ("uneven", 1, 1, r"pipeline have batches of \[4, 3\] samples"),
        ("stop", 1, 2, "a batch was left out on process 1 alone"),
        ("end-epoch", 3, 2, "a batch was left out on process 3 alone"),
    ],
)
def test_all_end(tmp_path: Path, kind: str, index: int, copies: int, error: str) -> None:
    codes, errors, took = run(tmp_path, kind, index, copies)
    assert codes == [-signal.SIGKILL if kind == "kill" and rank == index else 1 for rank in range(2 * copies)]
    assert took < ENDING
    named = error if kind == "kill" else f"(process {index} failed first|{error})"
    for rank, text in enumerate(errors):
        if kind != "kill" or rank != index:
            assert re.search(named, text), text
    if kind != "kill":
        assert re.search(error, errors[index]), errors[index]


@pytest.mark.parametrize(("kind", "end"), [("stop", "step 1, epoch 0"), ("end-epoch", "step 2, epoch 2")])
def test_control_flow_of_all(tmp_path: Path, kind: str, end: str) -> None:
    codes, errors, _ = run(tmp_path, kind, -1, 2)
    assert codes == [0, 0, 0, 0], errors
    assert all(f"ended at {end}" in text for text in errors)
