"""The clock of a run: where the time of its training goes, measured always."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..callbacks.ledger import CostLedger

now = time.perf_counter
"""Seconds; costs no Python call."""


@dataclass(slots=True)
class RunClock:
    """Seconds that the parts of a training took on the host of this process; no moment is in two of them.

    Nothing here waits for a device. Where that is behind, the time shows in the part that waits for it first: often the
    optimizer step, or a callback that reads a value.
    """

    ledger: CostLedger = field(default_factory=CostLedger)
    """What each callback takes."""
    forward: float = 0.0
    """In `training_step`; in manual optimization with the steps of the optimizers."""
    backward: float = 0.0
    """With the gradients' way between processes."""
    step: float = 0.0
    """Unscaling, clipping, the optimizer and the schedules of a step, and agreeing on it with other processes."""
    trackers: float = 0.0
    validation: float = 0.0
    """Without its callbacks and trackers."""
    saving: float = 0.0
    """What training waits for checkpoints, without callbacks."""
    _began: float = 0.0
    _ended: float | None = None
    _called: float = 0.0
    """The seconds of callbacks before the training."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context around all of the training."""
        self._began, self._ended, self._called = now(), None, self.ledger.seconds
        try:
            yield
        finally:
            self._ended = now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose time counts as that of a part, without what callbacks and trackers take in it."""
        began, inner = now(), self.ledger.seconds + self.trackers
        try:
            yield
        finally:
            own = now() - began - (self.ledger.seconds + self.trackers - inner)
            setattr(self, name, getattr(self, name) + own)

    @property
    def elapsed(self) -> float:
        """Seconds since the training began, or those of all of it."""
        return (now() if self._ended is None else self._ended) - self._began

    def seconds(self, data_wait: float) -> dict[str, float]:
        """The seconds of each part so far. Their sum is the time since the training began; `"other"` is the rest of it.

        Args:
            data_wait: the time spent waiting for batches.
        """
        parts = {
            "data": data_wait, "forward": self.forward, "backward": self.backward, "step": self.step,
            "callbacks": self.ledger.seconds - self._called, "trackers": self.trackers,
            "validation": self.validation, "saving": self.saving,
        }  # fmt: skip
        return {**parts, "other": max(0.0, self.elapsed - sum(parts.values()))}
