"""Starts the processes of failing_script.py for tests."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..nursery import Child, nursery
from ..ports import free_port

SCRIPT = Path(__file__).parent / "failing_script.py"
# A failure has to end all within 30 s; what comes on top is the start on a busy machine.
SECONDS = 30 + 60


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, process 0 first."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]


def start(*arguments: str, count: int, folder: Path, script: Path = SCRIPT) -> list[Child]:
    """Processes without an agent, so that nobody but they themselves ends them; process 0 holds the store."""
    processes = []
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for index in range(count):
        variables = {key: str(value) for key, value in (place | {"RANK": index, "LOCAL_RANK": index}).items()}
        processes.append(nursery().start(script, *arguments, env=os.environ | variables, cwd=folder))
    return processes


def ended(processes: list[Child]) -> Ended:
    """Wait for their ends.

    Raises:
        AssertionError: one has not come to it in time; with what all of them have written.
    """
    try:
        codes = [process.wait(SECONDS) for process in processes]
    except subprocess.TimeoutExpired as error:
        said = [f"--- process {index}:\n" + "".join(each.texts()) for index, each in enumerate(processes)]
        raise AssertionError(f"not ended in {SECONDS} s\n" + "\n".join(said)) from error
    finally:
        for process in processes:
            process.kill()
    texts = [process.texts() for process in processes]
    return Ended(codes, [output for output, _ in texts], [errors for _, errors in texts])
