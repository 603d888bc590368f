"""Which of the checkpoints that a run wrote are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .monitor import Monitor


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One checkpoint: a file of weights, or the folder of a whole state."""

    path: Path
    step: int
    """Optimizer steps applied when it was written."""
    score: float | None
    """The value of the monitored metric that its weights reached, None where it has none."""


class KeptCheckpoints:
    """The best checkpoints by their score, or without a monitor the newest ones.

    Of equal scores the earlier is the better. A score that is NaN or infinite comes after all others.

    Args:
        limit: how many of the best are kept, -1 for all.
        monitor: says which score is better; None: newer is better.
        keeps_newest: whether the one that was added last stays beside them.
    """

    def __init__(self, limit: int, monitor: Monitor | None, *, keeps_newest: bool = False) -> None:
        self._limit = limit
        self._monitor = monitor
        self._keeps_newest = keeps_newest
        self.ranked: list[SavedCheckpoint] = []
        """The best first."""
        self.newest: SavedCheckpoint | None = None
        """The one that was added last, where it stays."""

    @property
    def all(self) -> list[SavedCheckpoint]:
        """All that are kept, each once: the best first, then the newest."""
        is_beside = self.newest is not None and self.newest not in self.ranked
        return [*self.ranked, self.newest] if is_beside and self.newest is not None else list(self.ranked)

    @property
    def best(self) -> SavedCheckpoint | None:
        """The one of the best finite score, None before there is one and without a monitor."""
        if not self.ranked or self.ranked[0].score is None or not math.isfinite(self.ranked[0].score):
            return None
        return self.ranked[0]

    def copy(self) -> KeptCheckpoints:
        """The same list, to be changed by itself."""
        other = KeptCheckpoints(self._limit, self._monitor, keeps_newest=self._keeps_newest)
        other.ranked, other.newest = list(self.ranked), self.newest
        return other

    def accepts(self, score: float | None) -> bool:
        """Whether one of that score, written now, would be among the best."""
        if self._limit == -1 or score is None:
            return self._limit != 0
        if not math.isfinite(score):
            return False
        return len(self.ranked) < self._limit or self._rank_of(score) < self._rank(self.ranked[-1])[:2]

    def add(self, saved: SavedCheckpoint) -> list[SavedCheckpoint]:
        """Take in one that is whole on the disk. Returns those that are no longer kept."""
        before = [each for each in self.all if each.path != saved.path]  # without one that it replaced
        ranked = [each for each in self.ranked if each.path != saved.path]
        if self._monitor is None or saved.score is not None:
            ranked = sorted([*ranked, saved], key=self._rank)
        self.ranked = ranked if self._limit == -1 else ranked[: self._limit]
        if self._keeps_newest:
            self.newest = saved
        kept = self.all
        return [each for each in [*before, saved] if each not in kept]

    def _rank(self, each: SavedCheckpoint) -> tuple[bool, float, int]:
        if each.score is None:
            return (False, 0.0, -each.step)
        return (*self._rank_of(each.score), each.step)

    def _rank_of(self, score: float) -> tuple[bool, float]:
        if not math.isfinite(score):
            return (True, 0.0)
        return (False, -score if self._monitor is not None and self._monitor.mode == "max" else score)
