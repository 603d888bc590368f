"""Starts the processes of failing_script.py for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "failing_script.py"
# A failure has to end all within 30 s; what comes on top is the start on a busy machine.
SECONDS = 30 + 60


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, process 0 first."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]


def start(*arguments: str, count: int, folder: Path, script: Path = SCRIPT) -> list[subprocess.Popen[str]]:
    """Processes without an agent, so that nobody but they themselves ends them; process 0 holds the store."""
    processes = []
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for index in range(count):
        variables = {key: str(value) for key, value in (place | {"RANK": index, "LOCAL_RANK": index}).items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=os.environ | variables, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ended(processes: list[subprocess.Popen[str]]) -> Ended:
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    return Ended(codes, [output for output, _ in outputs], [errors for _, errors in outputs])
