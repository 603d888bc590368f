"""Which of the checkpoints that a run wrote are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .monitor import Monitor


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One checkpoint: a file of weights, or the folder of a whole state."""

    path: Path
    step: int
    """Optimizer steps applied when it was written."""
    score: float | None
    """The value of the monitored metric that its weights reached, None where it has none."""


class KeptFiles:
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
        self.files: list[SavedFile] = []
        """The best first."""
        self.newest: SavedFile | None = None
        """The one that was added last, where it stays."""

    @property
    def all(self) -> list[SavedFile]:
        """All that are kept, each once: the best first, then the newest."""
        is_beside = self.newest is not None and self.newest not in self.files
        return [*self.files, self.newest] if is_beside and self.newest is not None else list(self.files)

    @property
    def best(self) -> SavedFile | None:
        """The one of the best finite score, None before there is one and without a monitor."""
        if not self.files or self.files[0].score is None or not math.isfinite(self.files[0].score):
            return None
        return self.files[0]

    def copy(self) -> KeptFiles:
        """The same list, to be changed by itself."""
        other = KeptFiles(self._limit, self._monitor, keeps_newest=self._keeps_newest)
        other.files, other.newest = list(self.files), self.newest
        return other

    def accepts(self, score: float | None) -> bool:
        """Whether one of that score, written now, would be among the best."""
        if self._limit == -1 or score is None:
            return self._limit != 0
        if not math.isfinite(score):
            return False
        return len(self.files) < self._limit or self._rank_of(score) < self._rank(self.files[-1])[:2]

    def add(self, saved: SavedFile) -> list[SavedFile]:
        """Take in one that is whole on the disk. Returns those that are no longer kept."""
        before = [file for file in self.all if file.path != saved.path]  # without one that it replaced
        files = [file for file in self.files if file.path != saved.path]
        if self._monitor is None or saved.score is not None:
            files = sorted([*files, saved], key=self._rank)
        self.files = files if self._limit == -1 else files[: self._limit]
        if self._keeps_newest:
            self.newest = saved
        kept = self.all
        return [file for file in [*before, saved] if file not in kept]

    def _rank(self, file: SavedFile) -> tuple[bool, float, int]:
        if file.score is None:
            return (False, 0.0, -file.step)
        return (*self._rank_of(file.score), file.step)

    def _rank_of(self, score: float) -> tuple[bool, float]:
        if not math.isfinite(score):
            return (True, 0.0)
        return (False, -score if self._monitor is not None and self._monitor.mode == "max" else score)
