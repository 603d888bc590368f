"""How processes that were started ended: which failed first, in one line, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Set by torch's agent for each process: where it says how it failed."""
KILLED = 128
"""What a shell adds to the number of the signal that ended a program."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    """0, that of the process which failed first, or 128 and the number of the signal that ended it."""
    text: str = ""
    """One line on which process failed how; empty if none did."""
    traceback: str = ""
    """That process's traceback, where it is known."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended it."""


def record_failure(error: BaseException, text: str | None = None) -> None:
    """Tell the launcher how this process fails, so that it names the first cause. Local.

    Does nothing where no launcher asks for it, or where this process has told it already.

    Args:
        error: what ends it.
        text: what to say in place of the error's type and message.
    """
    place = os.environ.get(ERROR_FILE_VARIABLE, "")
    if not place or not Path(place).parent.is_dir() or Path(place).exists():
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "seconds": time.time(),
        "kind": type(error).__name__,
        "code": code_of(error),
    }
    message = {"message": text or f"{type(error).__name__}: {error}".removesuffix(": "), "extraInfo": extra}
    Path(place).write_text(json.dumps({"message": message}), encoding="utf-8")


def first_cause(failures: Mapping[int, Any], num_processes: int) -> Outcome:
    """The outcome for the process that failed first, of torch's records by process index. Local."""
    index = _first(failures)
    failure, report = failures[index], _report(failures[index])
    others = sorted(other for other in failures if other != index and failures[other].exitcode != -signal.SIGTERM)
    also = f" After it ended: {', '.join(map(str, others))}." if others else ""
    is_late = bool(report["message"]) and failure.exitcode == -signal.SIGTERM  # the launcher ended it on its way out
    code = report["code"] if is_late else exit_code_of(failure.exitcode)
    how = ending_of(code if is_late else failure.exitcode)
    cause = f"{_first_line(report['message'])} ({how})" if report["message"] else how
    return Outcome(
        exit_code=code,
        text=f"process {index} of {num_processes} failed first: {cause}.{also}",
        traceback=report["traceback"],
    )


def signal_outcome(number: int) -> Outcome:
    """The outcome when a signal ended the launcher, which passed it on. Local."""
    return Outcome(
        exit_code=KILLED + number,
        text=f"ended by {signal.Signals(number).name}, which was passed on to the processes.",
        is_interrupted=number == signal.SIGINT,
    )


def exit_code_of(code: int) -> int:
    """A shell's exit code for what a process returned: negative numbers are signals. Local."""
    return code if code >= 0 else KILLED - code


def code_of(error: BaseException) -> int:
    """The exit code to which an exception leads that nobody catches; 1 where it would be that of success. Local."""
    if isinstance(error, KeyboardInterrupt):
        return KILLED + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) and code else 1


def ending_of(code: int) -> str:
    """What a process returned, in words. Local."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {names.get(-code, f'signal {-code}')}{hint}"


def _first(failures: Mapping[int, Any]) -> int:
    """The index of the process that failed first.

    Those that failed because another one did come last; before them those that were ended by SIGTERM, as the launcher
    does when another one failed; before them those of which nothing is known; among equals the one seen first.
    """

    def rank(index: int) -> tuple[bool, bool, bool, float]:
        report = _report(failures[index])
        was_ended = exit_code_of(failures[index].exitcode) == KILLED + signal.SIGTERM  # at once, or in order
        return report["kind"] == "PeerFailedError", was_ended, not report["message"], report["seconds"]

    return min(failures, key=rank)


def _report(failure: Any) -> dict[str, Any]:
    """What a process has told of its failure, by `record_failure` or torch's `record`."""
    told = failure.message if isinstance(failure.message, dict) else {}
    extra = told.get("extraInfo", {})
    message = str(told.get("message", ""))
    return {
        "message": message,
        "kind": extra.get("kind", message.partition(":")[0]),
        "seconds": float(extra.get("seconds", failure.timestamp)),
        "traceback": str(extra.get("py_callstack", "")),
        "code": int(extra.get("code", 1)),
    }


def _first_line(text: str) -> str:
    first, *rest = text.strip().splitlines() or [""]
    return f"{first} ..." if rest else first.rstrip(".")
