"""The texts of the errors that `watch` raises: who failed, who is gone, who stands where."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import timedelta

from .failures import Answer, Failure, indent

# More stacks than this are not read; those of the missing processes come first.
MOST_STACKS = 16
_LEFT = "its script has ended, or it has left the group, at"


def waited_seconds(message: str, timeout: timedelta | None) -> float | None:
    """How long a collective waited: by torch's message, else by the timeout; None if neither says it."""
    found = re.search(r"(\d+)\s*ms", message)
    if found is not None:
        return int(found[1]) / 1000
    return None if timeout is None else timeout.total_seconds()


def failure_report(operation: str, index: int, failure: Failure) -> str:
    """What a process says that was stopped in an operation by the failure of another one."""
    return f"{failure.headline()}\nProcess {index} was in {operation!r} with it. What failed:\n{_details(failure)}"


def timeout_report(
    operation: str, index: int, waited: float | None, answers: Mapping[int, Answer], count: int, left: Mapping[int, str]
) -> str:
    """What a process says that waited in vain: who is missing, and where each stands.

    Args:
        operation: what it waited in.
        index: that process.
        waited: for how many seconds, None if nobody knows.
        answers: by process; who is not in it did not answer.
        count: the number of processes.
        left: where those stood that have ended their script, or left the group.
    """
    missing = [other for other in range(count) if other not in answers or answers[other].operation != operation]
    after = "" if waited is None else f" after {waited:g} s"
    names = f"never arrived: {_processes(missing)}" if missing else "all processes are in it"
    hint = (
        "All processes have to make the same collective calls in the same order."
        if missing
        else "They may have made a different number of such calls, or the data took longer than the timeout."
    )
    places = _places(answers, count, left, first=missing)
    return (
        f"{operation!r} timed out{after} in process {index}; {names}.\n{places}\n{hint} "
        "Where one only needs longer: Trainer(process_timeout=...), or InitProcessGroupKwargs(timeout=...)."
    )


def loss_report(
    operation: str, index: int, answers: Mapping[int, Answer], count: int, left: Mapping[int, str], is_store_lost: bool
) -> str:
    """What a process says whose connection broke, without any process having announced a failure."""
    gone = [other for other in range(count) if other not in answers and other not in left]
    known = []
    if left:
        known.append(
            f"Its script has ended, or it has left the group: {_processes(left)}. Look for an exit, or for calls that "
            "only others make."
        )
    if is_store_lost:  # so that nobody could be asked
        known.append("The store that processes share can't be reached: its host, process 0 or the launcher, is gone.")
    elif gone:
        known.append(f"No answer from {_processes(gone)}: killed or crashed, or its interpreter is blocked.")
    elif not left:
        known.append("All processes answer: the network between them failed, or one of them left the group.")
    places = [f"process {other}: {_LEFT} {place}" for other, place in left.items()]
    return "\n".join(
        (
            f"process {index} lost its connection to another process in {operation!r}. {' '.join(known)}",
            *(places if is_store_lost else [_places(answers, count, left, first=gone or list(left))]),
        )
    )


def last_report(index: int, failure: Failure, seconds: float, answer: Answer) -> str:
    """What a process prints that the watch ends."""
    return (
        f"Loopwright ends process {index}: it has not come to its end {seconds:g} s after another process failed.\n"
        f"{failure}\nprocess {index}: {answer.place}\n{indent(answer.stack)}"
    )


def _details(failure: Failure) -> str:
    return indent(failure.traceback or failure.text)


def _places(answers: Mapping[int, Answer], count: int, left: Mapping[int, str], first: Collection[int]) -> str:
    order = [*first, *(other for other in range(count) if other not in first)]
    lines = []
    for position, other in enumerate(order):
        if other in answers:
            lines.append(f"process {other}: {answers[other].place}")
            if position < MOST_STACKS:
                lines.append(indent(answers[other].stack))
        elif other in left:
            lines.append(f"process {other}: {_LEFT} {left[other]}")
        else:
            lines.append(f"process {other}: does not answer")
    return "\n".join(lines)


def _processes(indices: Collection[int]) -> str:
    word = "process" if len(indices) == 1 else "processes"
    return f"{word} {', '.join(map(str, sorted(indices)))}"
