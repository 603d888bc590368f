"""Tables in Markdown, so that README and docs can quote them as they are."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import date
from statistics import median

import torch
from loops import RAW
from ticks import CallCounter


def machine() -> str:
    """One line: the date, versions and the machine."""
    cpus = f"{os.cpu_count()} CPUs, 1 thread used"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{date.today()}, {versions}, {platform.machine()}, {cpus}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in (lines[0], rule)]
    padded += [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def calls_report(tiny: dict[str, CallCounter], linear: dict[str, CallCounter]) -> str:
    """Calls per optimizer step of each loop, with their ratio to the raw loop's, for two models."""
    rows = []
    for name, counter in tiny.items():
        row = [name, *_with_ratio(counter.python_calls(), tiny[RAW].python_calls()), f"{counter.builtin_calls():.1f}"]
        rows.append([*row, *_with_ratio(linear[name].all_calls(), linear[RAW].all_calls())])
    header = ("loop", "tiny: Python calls", "ratio", "tiny: C calls", "Linear(8,8): both", "ratio")
    return "\n## Calls per optimizer step\n\n" + table(header, rows)


def _with_ratio(calls: float, raw: float) -> tuple[str, str]:
    return f"{calls:.1f}", f"{calls / raw:.2f}"


def additions_report(bare: CallCounter, added: dict[str, CallCounter]) -> str:
    """What small things add to the bare Trainer."""
    base = bare.python_calls()
    rows = [(name, f"{counter.python_calls() - base:+.2f}") for name, counter in added.items()]
    return "\n## Added to the bare Trainer\n\n" + table(("what", "Python calls/step"), rows)


def breakdown_report(name: str, raw: CallCounter, counter: CallCounter) -> str:
    """Where a loop's calls differ from the raw loop's, largest first."""
    ours, theirs = counter.by_function(), raw.by_function()
    gains = {where: ours.get(where, 0.0) - theirs.get(where, 0.0) for where in ours.keys() | theirs.keys()}
    ordered = sorted((item for item in gains.items() if item[1]), key=lambda item: -item[1])
    rows = [(f"{more:+.2f}", function, "/".join(file.split("/")[-3:])) for (file, function), more in ordered]
    total = counter.python_calls() - raw.python_calls()
    return f"\n## {name}: {total:+.2f} calls over raw\n\n" + table(("calls/step", "function", "file"), rows)


def time_report(workload: str, seconds: dict[str, list[float]]) -> str:
    """Each loop's time over the raw loop's of the same round."""
    raw = seconds[RAW]
    rows = []
    for name, times in seconds.items():
        ratios = [time / base for time, base in zip(times, raw, strict=True)]
        over = median(time - base for time, base in zip(times, raw, strict=True))
        rows.append(
            (
                name,
                f"{median(ratios):.3f}",
                f"{min(ratios):.3f}",
                f"{max(ratios):.3f}",
                f"{min(times) / min(raw):.3f}",
                f"{over * 1e6:+.0f}",
            )
        )
    header = ("loop", "median", "min", "max", "least / least", "over raw, us")
    title = f"\n## Time per optimizer step, {workload}: raw {median(raw) * 1e6:.0f} us, {len(raw)} rounds\n\n"
    return title + table(header, rows)
