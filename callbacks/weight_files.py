"""`WeightFiles`: checkpoints that hold weights alone, each one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.shards import SUFFIX
from ..checkpoint.tensor_file import TensorFile
from ..distributed.errors import CheckpointError
from .kept_checkpoints import SavedCheckpoint
from .store import OWNER, Rules, Store, entries_of
from .together import by_main_process

if TYPE_CHECKING:
    from .view import TrainerView

_LAST = "last" + SUFFIX
_SAVED_BY = "loopwright.saved_by"
"""In the metadata of each file, as JSON: the run, the callback and the step that it is of."""


class WeightFiles(Store):
    """Writes safetensors files at once: `last`, and one for each of the best, or by name of the newest.

    Args:
        rules: of the callback.
    """

    kind = "weights"
    sees_end = False

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, SUFFIX, keeps_newest=False)
        self._last_path: Path | None = None

    @property
    def last_path(self) -> Path | None:
        return self._last_path

    def save_newest(self, trainer: TrainerView) -> None:
        self._save_named(trainer)
        self._save_last(trainer)

    def save_at_end(self, trainer: TrainerView, *, is_due: bool) -> None:
        if is_due:
            self._save_named(trainer)
        self._save_last(trainer)

    def save_scored(self, trainer: TrainerView, score: float, metrics: Mapping[str, float], *, accepted: bool) -> None:
        if accepted:
            self._keep(trainer, score, metrics)

    def _save_last(self, trainer: TrainerView) -> None:
        step = trainer.state.step
        if not self.rules.last or step == self._last_step:  # written already, or nothing was trained yet
            return
        path = self._save(trainer, _LAST, self._last_path)
        if path is not None:
            self._last_path, self._last_step = path, step

    def _save_named(self, trainer: TrainerView) -> None:
        files = self.kept.ranked
        is_new = not files or files[0].step != trainer.state.step
        if self.rules.names_newest and is_new and self.kept.accepts(None):
            self._keep(trainer, None, {})

    def _keep(self, trainer: TrainerView, score: float | None, metrics: Mapping[str, float]) -> None:
        name, files = self.rules.name.format(trainer.state, metrics), self.kept.ranked
        older = files[0].path if self.rules.name.is_fixed and self.rules.top_k == 1 and files else None
        path = self._save(trainer, name, older)
        if path is None:
            return
        for file in self.kept.add(SavedCheckpoint(path, trainer.state.step, score)):
            self.own.remove(file.path, self.folder, unlinks=trainer.process.is_main_process)

    def _save(self, trainer: TrainerView, name: str, older: Path | None) -> Path | None:
        """Write the weights, in the place of an older file if it is this run's. Collective, unless the run is failing.

        Returns:
            The file; None where nothing was written, since a weight is not finite.
        Raises:
            CheckpointError: on every process: the main one could not write.
        """

        is_finite = self.has_finite_weights(trainer)

        def choose() -> str | None:
            return str(self._path(name, older)) if is_finite else None

        told = by_main_process(trainer, choose, f"{OWNER}: choosing the file {name}")
        if told is None:
            return None
        path = Path(told)
        step = trainer.state.step
        origin = {"run": trainer.run_id, "callback": self.key, "step": step}
        write_together(trainer, path, {_SAVED_BY: json.dumps(origin)})
        self.own.add(path)
        self.own.remove_left(self.folder, step, unlinks=trainer.process.is_main_process)
        return path

    def _path(self, name: str, older: Path | None) -> Path:
        """Where a file goes: in the place of its older one, or where no file is."""
        if older is not None and self.own.has(older, self.folder):
            return older
        return self.own.free_path(self.folder, name)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "kept": entries_of(self.kept.ranked),
            "last": None if self._last_path is None else str(self._last_path),
        }

    def _take_back(self, trainer: TrainerView, state: Mapping[str, Any]) -> None:
        self._take_back_kept(trainer, state)
        if state["last"] is not None:
            self._last_path = self._find(trainer, state, [state["last"]])[0]
            if self._last_path is not None:
                self._take_over(self._last_path)
        if self._is_own_run:
            told = by_main_process(trainer, lambda: self._find_left(trainer), f"{OWNER}: what an earlier leg has left")
            self.own.take_over({self.folder / name: step for name, step in told.items()})

    def _find_left(self, trainer: TrainerView) -> dict[str, int]:
        """The files that this callback wrote after the checkpoint that the run goes on from, and their steps. Local."""
        found: dict[str, int] = {}
        for path in self.folder.glob(f"*{SUFFIX}"):
            origin = _origin_of(path)
            is_ours = (origin.get("run"), origin.get("callback")) == (trainer.run_id, self.key)
            if is_ours and path not in self.own.paths and origin["step"] >= trainer.state.step:
                found[path.name] = origin["step"]
        return found


def _origin_of(path: Path) -> dict[str, Any]:
    try:
        metadata = TensorFile(path).metadata
        return dict(json.loads(metadata.get(_SAVED_BY, "{}")))
    except (CheckpointError, OSError, ValueError):
        return {}  # whoever wrote it, this run's files are whole


def write_together(trainer: TrainerView, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights into a file. Collective, unless the run is failing.

    Args:
        trainer: of this process.
        path: the file; that of the main process counts.
        metadata: texts beside the weights.
    Raises:
        CheckpointError: on every process: it can't be written.
    """
    if not trainer.process.is_main_process:
        trainer.save_model(path)  # writes nothing, and gives its part of the weights where it has one
    by_main_process(trainer, lambda: _write(trainer, path, metadata), f"{OWNER}: writing {path.name}")


def _write(trainer: TrainerView, path: Path, metadata: Mapping[str, str] | None) -> None:
    try:
        trainer.save_model(path, metadata=metadata)
    except OSError as error:
        raise CheckpointError(
            f"{OWNER} could not write {str(path)!r} at step {trainer.state.step}: {error}. What was written before is "
            "whole. Make room there, or choose another folder by directory=."
        ) from error
