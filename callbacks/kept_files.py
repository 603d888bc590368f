"""Which of the files that a run wrote are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .monitor import Monitor


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of weights."""

    path: Path
    step: int
    """Optimizer steps applied when it was written."""
    score: float | None
    """The value of the monitored metric that these weights reached, None without a monitor."""


class KeptFiles:
    """The best files by their score, or without a monitor the newest ones.

    Of equal scores the earlier is the better. A score that is NaN or infinite comes after all others.

    Args:
        limit: how many are kept, -1 for all.
        monitor: says which score is better; None: newer is better.
    """

    def __init__(self, limit: int, monitor: Monitor | None) -> None:
        self._limit = limit
        self._monitor = monitor
        self.files: list[SavedFile] = []
        """The best first."""

    @property
    def best(self) -> SavedFile | None:
        """The file of the best finite score, None before there is one and without a monitor."""
        if not self.files or self.files[0].score is None or not math.isfinite(self.files[0].score):
            return None
        return self.files[0]

    def accepts(self, score: float | None) -> bool:
        """Whether a file of that score, written now, would be kept."""
        if self._limit == -1 or score is None:
            return self._limit != 0
        if not math.isfinite(score):
            return False
        return len(self.files) < self._limit or self._rank_of(score) < self._rank(self.files[-1])[:2]

    def add(self, saved: SavedFile) -> list[SavedFile]:
        """Take in a file that is whole on the disk. Returns those that are no longer kept."""
        files = [file for file in self.files if file.path != saved.path]  # one that it replaced
        self.files = sorted([*files, saved], key=self._rank)
        if self._limit == -1:
            return []
        dropped = self.files[self._limit :]
        self.files = self.files[: self._limit]
        return dropped

    def _rank(self, file: SavedFile) -> tuple[bool, float, int]:
        if file.score is None:
            return (False, 0.0, -file.step)
        return (*self._rank_of(file.score), file.step)

    def _rank_of(self, score: float) -> tuple[bool, float]:
        if not math.isfinite(score):
            return (True, 0.0)
        return (False, -score if self._monitor is not None and self._monitor.mode == "max" else score)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"files": [{"path": str(f.path), "step": f.step, "score": f.score} for f in self.files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[SavedFile]:
        """Take back what `state_dict` gave, as far as the files exist. Returns those that don't."""
        files = [SavedFile(Path(f["path"]), f["step"], f["score"]) for f in state["files"]]
        self.files = [file for file in files if file.path.is_file()]
        return [file for file in files if file not in self.files]
