"""Processes that wait for each other in two places: found by what their watches tell each other, before a time-out.

Manual optimization averages gradients after each backward pass of a task's own making. A process that leaves its
`training_step` before one comes to the vector after the step, and waits there for another that waits for it in its
backward pass. Nobody sees that from inside these calls, which differ in kind. So the watch of a process that has
waited for a while in one of them tells how many such averagings it has been in:

- who waits in the vector with fewer than who waits in an averaging can't come to it any more: a vector waits for all;
- who waits in the vector with as many or more is only ahead, and the other's averaging is about to end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .positions import AVERAGING, HERE, MEETING


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that has been in one collective for a while."""

    index: int
    kind: str | None
    """`MEETING` or `AVERAGING`; who waits in anything else is not compared."""
    operation: str | None
    num_averagings: int
    """How many averagings it has begun in this group."""

    @classmethod
    def now(cls, index: int, num_before: int) -> Waiting:
        """What this process waits in. Local; from any thread.

        Args:
            index: this process.
            num_before: averagings that it had begun before the group was there.
        """
        return cls(index, HERE.kind, HERE.operation, HERE.num_averagings - num_before)

    def as_dict(self) -> dict[str, Any]:
        """What `Waiting(**...)` makes it of again."""
        return asdict(self)


def divergence(own: Waiting, other: Waiting) -> str | None:
    """Why this process waits in vain for another one; None where they may still meet, as far as that is known."""
    is_apart = (own.kind, other.kind) == (MEETING, AVERAGING) and own.num_averagings < other.num_averagings
    if not is_apart:
        return None
    return (
        f"process {own.index} left its training_step before a backward pass in which process {other.index} waits for "
        f"it: it is in {own.operation!r} after {own.num_averagings} backward passes, and process {other.index} is in "
        f"its {other.num_averagings}. one. In manual optimization all processes have to make the same backward passes. "
        "Leave a step out on all of them, or on this one give backward a loss of zero: 0.0 * loss."
    )
