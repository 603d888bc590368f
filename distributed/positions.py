"""Where this process stands: the event, the step and the collective that it is in.

Loops and collectives write it with plain assignments, so that it costs nothing; the watch thread reads it when some
process asks (`watch`). There is one position per process, as there is one default process group in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

MEETING = "meeting"
"""A wait for all processes, which nobody leaves before all have come."""
AVERAGING = "averaging"
"""An averaging of gradients after a backward pass that the user's code makes."""


@dataclass(slots=True)
class Position:
    """What a process is doing: `"training_step, step 7, in 'reduce'"`."""

    event: str = "start"
    step: int | None = None
    operation: str | None = None
    """The collective that its main thread is inside of, None outside."""
    entries: int = 0
    """How many collectives it has entered, so that a reader can tell one that lasts from one that follows."""
    kind: str | None = None
    """That of the collective, if it is one of those above."""
    num_averagings: int = 0
    """How many of these it has begun."""

    def __str__(self) -> str:
        parts = [self.event]
        if self.step is not None:
            parts.append(f"step {self.step}")
        parts.append("outside any collective" if self.operation is None else f"in {self.operation!r}")
        return ", ".join(parts)


HERE = Position()
"""This process's own."""


def stand(event: str, step: int | None = None) -> None:
    """Record what this process is doing, for the reports of `watch`. Local.

    Args:
        event: a word or two: the hook that runs, the phase of a loop.
        step: the optimizer steps applied, where there are such.
    """
    HERE.event = event
    HERE.step = step
