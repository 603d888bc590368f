"""`OverheadBudget`: a limit on the share of a training's time that its bookkeeping may take."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..distributed.errors import ConfigError
from .clock import RunClock


@dataclass(slots=True)
class OverheadBudget:
    """Holds trackers below a share of the training's time by leaving out records of steps. Local to the process."""

    share: float
    """Of the time of the training, above 0 and below 1; for trackers, and for callbacks a second time."""
    num_left_out: int = 0
    """Records that trackers did not get."""

    def allows(self, clock: RunClock) -> bool:
        """Whether trackers may be given another record of a step; says so once when they may not."""
        if clock.trackers <= self.share * clock.elapsed:
            return True
        if not self.num_left_out:
            warnings.warn(
                f"trackers have taken {_percent(clock.trackers, clock)} of the training's time, above "
                f"overhead_budget={self.share:.2%}: they get fewer records of steps from now on, and those of epochs "
                "and evaluations as before. A larger log_every does the same without a choice by the clock.",
                stacklevel=2,
            )
        self.num_left_out += 1
        return False

    def report(self, clock: RunClock) -> None:
        """Warn of callbacks that took more at the end of a training; nothing can be left out of them."""
        parts = clock.ledger.by_owner()
        if sum(parts.values()) <= self.share * clock.elapsed:
            return
        most = ", ".join(f"{name} {_percent(seconds, clock)}" for name, seconds in list(parts.items())[:3])
        warnings.warn(
            f"callbacks took {_percent(sum(parts.values()), clock)} of the training's time, above "
            f"overhead_budget={self.share:.2%}; the most expensive: {most}. EventTimer() shows in which events.",
            stacklevel=2,
        )


def read_overhead_budget(value: object) -> float | None:
    """The share of the time that bookkeeping may take, None for no limit.

    Raises:
        ConfigError: it is no share.
    """
    if value is None:
        return None
    share: object = value
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            share = None
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ConfigError(
            f"overhead_budget={value!r}. Expected a share of the training's time, such as '2%' or 0.02, or None."
        )
    return float(share)


def _percent(seconds: float, clock: RunClock) -> str:
    return f"{100 * seconds / max(clock.elapsed, 1e-9):.1f} %"
