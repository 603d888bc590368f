"""`Store`: what the two kinds of checkpoints have in common that `ModelCheckpoint` writes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .file_names import FileName
from .kept_checkpoints import KeptCheckpoints, SavedCheckpoint
from .monitor import Monitor
from .own_files import OwnFiles
from .together import by_main_process

if TYPE_CHECKING:
    from .view import TrainerView

OWNER = "ModelCheckpoint"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What `ModelCheckpoint` was told."""

    top_k: int
    """How many of the best, or without a monitor of the newest, are kept; -1: all."""
    last: bool
    """Whether the newest is kept beside the best."""
    monitor: Monitor | None
    name: FileName
    """Of each checkpoint."""
    names_newest: bool
    """Whether files of weights of the newest have names of their own, beside `last`."""
    asynchronous: bool | None
    """Whether whole states are written in the background; None: as the Trainer does by itself."""


class Store(ABC):
    """Writes checkpoints of one kind into a folder, and keeps those of them that the rules say.

    Args:
        rules: of the callback.
        suffix: the end of the checkpoints' names.
        keeps_newest: whether the newest is in the list beside the best.
    """

    kind: str
    """The name of this kind, in what a checkpoint keeps of the callback."""
    sees_end: bool
    """Whether the newest state is saved where the run ends in order, by `on_stop`, and not by `on_fit_end`."""

    def __init__(self, rules: Rules, suffix: str, *, keeps_newest: bool) -> None:
        self.rules = rules
        self.folder = Path()
        """Where it writes."""
        self.kept = KeptCheckpoints(rules.top_k, rules.monitor, keeps_newest=keeps_newest)
        self.own = OwnFiles(OWNER, suffix)
        self.key = ""
        """What tells the callback from the run's others, in every leg."""
        self.siblings: Sequence[Store] = ()
        """Those of the run's other callbacks, which may write into the same folder."""
        self.stopgap: Path | None = None
        """Weights that were saved in a hurry: they go when a whole state is there."""
        self._last_step = 0
        """Where the newest was saved or asked for, or this leg began: there is nothing newer to save."""
        self._run_id = ""
        self._is_own_run = False
        self._has_warned = False

    @property
    def asked(self) -> set[Path]:
        """Where checkpoints will be that are not whole yet."""
        return set()

    @property
    @abstractmethod
    def last_path(self) -> Path | None:
        """The newest checkpoint, where one stays."""

    @abstractmethod
    def save_newest(self, trainer: TrainerView) -> None:
        """Save since it is time to. Collective, unless the run is failing.

        Raises:
            CheckpointError: on every process: it can't be written.
        """

    @abstractmethod
    def save_scored(self, trainer: TrainerView, score: float, metrics: Mapping[str, float], *, accepted: bool) -> None:
        """Save weights that reached this value of the metric, if it is among the best. Collective.

        Args:
            trainer: of this process.
            score: of the main process.
            metrics: those that have a new value.
            accepted: whether the main process finds it among the best.
        Raises:
            CheckpointError: on every process: it can't be written.
        """

    def save_at_end(self, trainer: TrainerView, *, is_due: bool) -> None:
        """Save where the run ends. Collective, unless the run is failing.

        Args:
            trainer: of this process.
            is_due: whether the interval names the end.
        """
        if trainer.error is None and trainer.state.step and not (self.kept.all or self.asked):
            self._last_step = -1  # nothing was trained since the run went on, from a checkpoint that is not kept here
        if is_due or self.rules.last:
            self.save_newest(trainer)

    def begin(self, trainer: TrainerView, folder: Path, state: Mapping[str, Any] | None) -> None:
        """Go on in this folder from what `state_dict` gave, or begin anew. Collective."""
        self.folder, self._run_id = folder, trainer.run_id
        if state is not None:
            self._is_own_run = state["run"] == trainer.run_id
            self._take_back(trainer, state)
        self._last_step = trainer.state.step

    def on_saved(self, trainer: TrainerView, path: Path) -> None:
        """Take in a checkpoint that the Trainer has written, if it was asked for here. Local."""

    def withdraw(self, trainer: TrainerView, *, scored: bool) -> SavedCheckpoint | None:
        """Take back what was asked for and is not being written. Collective.

        Args:
            trainer: of this process.
            scored: also those that have a value of the metric.
        Returns:
            The newest of them.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the store."""
        return {"run": self._run_id, "folder": str(self.folder), "kind": self.kind}

    @abstractmethod
    def _take_back(self, trainer: TrainerView, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, as far as it is on the disk."""

    def _find(self, trainer: TrainerView, state: Mapping[str, Any], texts: Sequence[str]) -> list[Path | None]:
        """Where checkpoints of an earlier leg are now, None for those that are gone: the folder may have moved.
        Collective.
        """

        def look() -> list[str | None]:
            found: list[str | None] = []
            for path in map(Path, texts):
                moved = self.folder / path.name if str(path.parent) == state["folder"] else path
                found.append(next((str(each) for each in (path, moved) if each.exists()), None))
            return found

        told = by_main_process(trainer, look, f"{OWNER}: what is left of the earlier leg")
        return [None if text is None else Path(text) for text in told]

    def _take_back_kept(self, trainer: TrainerView, state: Mapping[str, Any]) -> None:
        """Take back the list, as far as its files exist; warn of those that don't. Collective."""
        entries = state["kept"]
        paths = self._find(trainer, state, [each["path"] for each in entries])
        for entry, path in zip(entries, paths, strict=True):
            if path is not None:
                self.kept.add(SavedCheckpoint(path, entry["step"], entry["score"]))
                self._take_over(path)
            elif trainer.process.is_main_process:
                warnings.warn(f"{OWNER}: {entry['path']!r} of step {entry['step']} is gone.", stacklevel=2)

    def _take_over(self, path: Path) -> None:
        """Know that this run wrote it, if it did."""
        if self._is_own_run:
            self.own.paths.add(path)

    def has_finite_weights(self, trainer: TrainerView) -> bool:
        """Whether the weights may be saved; the main process warns, once, if not. Collective where each process has a
        part of them, unless the run is failing; elsewhere only the main process looks.
        """
        is_main = trainer.process.is_main_process
        bad = trainer.nonfinite_weight() if is_main or not trainer.has_whole_model else None
        if bad is not None and is_main and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{OWNER}: {bad!r} is not finite at step {trainer.state.step}; nothing is written as long as this "
                "lasts, and what was saved earlier stays. NaNGuard finds where it begins.",
                stacklevel=2,
            )
        return bad is None


def entries_of(saved: Sequence[SavedCheckpoint]) -> list[dict[str, Any]]:
    """A list of checkpoints as plain values."""
    return [{"path": str(each.path), "step": each.step, "score": each.score} for each in saved]
