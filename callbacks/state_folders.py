"""`StateFolders`: checkpoints from which a run goes on, each one folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.finding import find_checkpoints
from ..checkpoint.reading import open_checkpoint
from ..distributed.errors import CheckpointError
from .file_names import FileName
from .kept_checkpoints import SavedCheckpoint
from .store import OWNER, Rules, Store, entries_of
from .together import by_main_process

if TYPE_CHECKING:
    from .view import TrainerView

STEP_NAME = "{step:06d}"


class StateFolders(Store):
    """Asks the Trainer for whole states, which it writes at the end of a step boundary.

    One checkpoint serves all that comes due at a step: it is the newest and, with a value of the metric, one of the
    best. Others go when it is whole.

    Args:
        rules: of the callback.
    """

    kind = "state"
    sees_end = True

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, "", keeps_newest=rules.last)
        self._asked: dict[Path, SavedCheckpoint] = {}
        """Those that the Trainer was asked for and that are not whole yet, in their order."""
        self._step_name = FileName(STEP_NAME, metrics_allowed=False, option=OWNER, suffix="")

    @property
    def last_path(self) -> Path | None:
        kept = self.kept.all
        return max(kept, key=lambda each: each.step).path if kept else None

    @property
    def asked(self) -> set[Path]:
        return set(self._asked)

    def save_newest(self, trainer: TrainerView) -> None:
        paces = self.rules.last or self.rules.monitor is None
        if paces and trainer.state.step != self._last_step:  # not asked for yet, and something was trained
            self._ask(trainer, None, {})

    def save_scored(self, trainer: TrainerView, score: float, metrics: Mapping[str, float], *, accepted: bool) -> None:
        if trainer.state.step not in {saved.step for saved in (*self._asked.values(), *self.kept.all)}:
            if accepted:
                self._ask(trainer, score, metrics)
        elif not self._ask_again(trainer, score, metrics):
            self._score_saved(trainer, score, accepted=accepted)

    def withdraw(self, trainer: TrainerView, *, scored: bool) -> SavedCheckpoint | None:
        found: SavedCheckpoint | None = None
        for saved in list(self._asked.values()):
            if (scored or saved.score is None) and trainer.withdraw_save(saved.path):
                found = self._asked.pop(saved.path)
                self._last_step = -1
        return found

    def _ask_again(self, trainer: TrainerView, score: float, metrics: Mapping[str, float]) -> bool:
        """Give what was asked for at this very boundary its score, and the name that goes with it."""
        if self.withdraw(trainer, scored=False) is None:
            return False
        self._ask(trainer, score, metrics)
        return True

    def _score_saved(self, trainer: TrainerView, score: float, *, accepted: bool) -> None:
        """Remember the score of what was saved at this step already: the weights are the same."""
        step = trainer.state.step
        asked = next((saved for saved in self._asked.values() if saved.step == step), None)
        if asked is not None and asked.score is None:
            self._asked[asked.path] = replace(asked, score=score)
        kept = next((saved for saved in self.kept.all if saved.step == step and saved.score is None), None)
        if kept is not None and accepted:
            self._drop(trainer, self.kept.add(replace(kept, score=score)))

    def _ask(self, trainer: TrainerView, score: float | None, metrics: Mapping[str, float]) -> None:
        """Ask for a checkpoint; what is asked for already and has no score is served by it. Collective."""
        step = trainer.state.step
        is_failing = trainer.error is not None
        if is_failing and not trainer.process.is_main_process:
            return
        earlier = self.withdraw(trainer, scored=is_failing)
        if score is None and earlier is not None and earlier.step == step:
            score = earlier.score

        is_finite = self.has_finite_weights(trainer)

        def name() -> str | None:
            return str(self._free_path(trainer, score, metrics)) if is_finite else None

        told = by_main_process(trainer, name, f"{OWNER}: naming a checkpoint")
        if told is None:
            return
        path = Path(told)
        self._asked[path] = SavedCheckpoint(path, step, score)
        self._last_step = step
        trainer.save_state(path, scores=self._scores(score), asynchronous=self.rules.asynchronous)

    def _free_path(self, trainer: TrainerView, score: float | None, metrics: Mapping[str, float]) -> Path:
        name = self._step_name if score is None and self.rules.name.has_metrics else self.rules.name
        taken = self.asked.union(*(each.asked for each in self.siblings))
        return self.own.free_path(self.folder, name.format(trainer.state, metrics), taken=taken)

    def _scores(self, score: float | None) -> list[dict[str, Any]]:
        monitor = self.rules.monitor
        if monitor is None or score is None or not math.isfinite(score):
            return []
        return [{"name": monitor.name, "mode": monitor.mode, "value": score}]

    def on_saved(self, trainer: TrainerView, path: Path) -> None:
        saved = self._asked.pop(path, None)
        if saved is None or (trainer.process.is_main_process and not _is_whole(saved)):
            return
        self.own.paths.add(path)
        dropped = self.kept.add(saved)
        if trainer.error is None:  # what an exception leaves can't be exact, so the one before stays with it
            self._drop(trainer, dropped)
        if self.stopgap is not None:
            self.stopgap.unlink(missing_ok=True)
            self.stopgap = None

    def _drop(self, trainer: TrainerView, dropped: list[SavedCheckpoint]) -> None:
        for each in dropped:
            self._remove(trainer, each.path)

    def _remove(self, trainer: TrainerView, path: Path) -> None:
        unlinks = trainer.process.is_main_process and _is_of(path, trainer.run_id)
        self.own.remove(path, self.folder, unlinks=unlinks)

    def state_dict(self) -> dict[str, Any]:
        """As it will be when all that was asked for is whole, so that it fits the checkpoint which it is saved in."""
        kept = self.kept.copy()
        dropped = [each.path for saved in self._asked.values() for each in kept.add(saved)]
        return super().state_dict() | {
            "kept": entries_of(sorted(kept.all, key=lambda each: each.step)),
            "dropped": [str(path) for path in dropped if path in self._asked or self.own.has(path, self.folder)],
        }

    def _take_back(self, trainer: TrainerView, state: Mapping[str, Any]) -> None:
        self._take_back_kept(trainer, state)
        for path in self._find(trainer, state, state["dropped"]):
            if path is not None:  # the run ended between the commit of a checkpoint and the removal of another
                self._take_over(path)
                self._remove(trainer, path)
        if trainer.process.is_main_process and self._is_own_run:
            _warn_of_later(trainer, self.folder, {each.path for each in self.kept.all})


def _is_whole(saved: SavedCheckpoint) -> bool:
    """Whether a checkpoint is what it says. Where it is not, nothing may be removed for its sake. Local."""
    try:
        manifest = open_checkpoint(saved.path, verify="sizes").manifest
    except CheckpointError as error:
        warnings.warn(f"{OWNER}: what was just saved is not whole, so the earlier ones stay: {error}", stacklevel=2)
        return False
    if saved.score is not None and manifest.progress.get("step", saved.step) != saved.step:
        warnings.warn(
            f"{OWNER}: the value {saved.score:g} belongs to step {saved.step}, and {saved.path.name!r} holds the state "
            "one step later, since an accumulation window was open over the epoch's end. Use "
            "accumulate_across_epochs='flush' for the very weights.",
            stacklevel=2,
        )
    return True


def _is_of(path: Path, run_id: str) -> bool:
    """Whether a checkpoint is of this run, which alone may remove it. Local."""
    try:
        return bool(open_checkpoint(path, verify="sizes").manifest.run.get("id") == run_id)
    except CheckpointError as error:
        if path.exists():
            warnings.warn(f"{OWNER}: {str(path)!r} is left as it is: {error}", stacklevel=2)
        return False


def _warn_of_later(trainer: TrainerView, folder: Path, known: set[Path]) -> None:
    """Name the checkpoints of this run that lie behind the one which it goes on from. Local."""
    step = trainer.resumed_step
    later = [
        each.path.name
        for each in find_checkpoints(folder)
        if step is not None
        and each.path not in known
        and each.manifest.run.get("id") == trainer.run_id
        and each.manifest.progress.get("step", 0) > step
    ]
    if later:
        warnings.warn(
            f"{OWNER}: {', '.join(later)} in {str(folder)!r} were saved behind step {step}, from which this run goes "
            "on. They stay, and are not among the best.",
            stacklevel=2,
        )
