"""The ledger of a run: what each handler of an event takes of its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Cost:
    """What one handler of one event has taken so far."""

    owner: str
    """The callback's class, or the function."""
    event: str
    seconds: float = 0.0
    """On the host, without what other handlers took that it called in turn."""
    calls: int = 0
    longest: float = 0.0
    """The seconds of its longest call."""
    synchronizations: int = 0
    """How often it waited for a device, or would have on one; where `EventTimer(synchronizations=True)` counts it."""


class CostLedger:
    """What all handlers of a run have taken. Time on the host: it includes waiting for a device, where they wait.

    `seconds` grows by each moment once, whatever handlers call each other.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of all handlers together."""
        self.costs: list[Cost] = []
        """In the order in which they were bound first."""
        self._known: dict[tuple[int, str], tuple[object, Cost]] = {}

    def cost_of(self, handler: Callable[..., Any], event: str) -> Cost:
        """The cost of a handler of an event; asked again for the same one, it goes on."""
        receiver = getattr(handler, "__self__", handler)
        key = (id(receiver), event)
        if key not in self._known:
            # With the receiver itself, so that no other object can get its number.
            self._known[key] = (receiver, Cost(owner_of(handler), event))
            self.costs.append(self._known[key][1])
        return self._known[key][1]

    def by_owner(self) -> dict[str, float]:
        """Seconds by callback or function, the most expensive first; those of one class together."""
        seconds: dict[str, float] = {}
        for cost in self.costs:
            seconds[cost.owner] = seconds.get(cost.owner, 0.0) + cost.seconds
        return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))


def owner_of(handler: Callable[..., Any]) -> str:
    """What messages call a handler: the class of its callback, or the function's name, without what it stands in."""
    receiver = getattr(handler, "__self__", None)
    if receiver is not None:
        return type(receiver).__name__
    name = str(getattr(handler, "label", getattr(handler, "__qualname__", handler)))
    return name.rpartition("<locals>.")[2]
