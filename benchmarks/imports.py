"""What imports cost over `import torch`, and what the command line costs over an empty Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec

from report import table

STATEMENTS = {
    "import torch": "import torch",
    "import loopwright": "import torch, loopwright",
    "from loopwright import Task, Trainer": "import torch; from loopwright import Task, Trainer",
    "import accelerate": "import torch, accelerate",
    "import lightning": "import torch, lightning",
    "import ignite.engine": "import torch, ignite.engine",
}


def cpu_seconds(statement: str) -> float:
    """User and system time of an interpreter that runs `statement`."""
    before = os.times()
    subprocess.run([sys.executable, "-c", statement], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return (after.children_user - before.children_user) + (after.children_system - before.children_system)


def import_report(*, repeats: int) -> str:
    """A table of the least of `repeats` imports each, taken in turn, less that of torch."""
    names = [name for name, code in STATEMENTS.items() if find_spec(code.split()[-1].split(".")[0]) or "Task" in name]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            times[name].append(cpu_seconds(STATEMENTS[name]))
    base = min(times["import torch"])
    rows = [(name, f"{min(seconds):.2f}", f"{min(seconds) - base:+.2f}") for name, seconds in times.items()]
    return "\n## Import, CPU seconds\n\n" + table(("statement", "least", "over torch"), rows)


def start_report(*, repeats: int) -> str:
    """A table of the wall-clock time of the command line's start beside an empty Python's, the least of each."""
    commands = {"python -c pass": ("-c", "pass"), "python -m loopwright --help": ("-m", "loopwright", "--help")}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, arguments in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - began)
    rows = [(name, f"{min(seconds):.3f}") for name, seconds in times.items()]
    return "\n## Start of the command line, seconds\n\n" + table(("command", "least"), rows)
