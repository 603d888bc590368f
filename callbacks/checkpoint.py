"""`ModelCheckpoint`: the newest and the best states of a run, each whole or absent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.claims import FolderClaim
from ..checkpoint.weights import load_weights
from ..distributed.errors import CheckpointError, ConfigError, PeerFailedError
from ..distributed.paths import prove_writable
from .callback import Callback
from .checkpoint_options import check_options, read_directory, read_file_name
from .deadline import save_in_time
from .intervals import Interval, IntervalLike, Schedule
from .kept_checkpoints import SavedCheckpoint
from .monitor import Mode, Monitor
from .order import state_keys
from .preemption import grace_left
from .state_folders import StateFolders
from .store import Rules, Store
from .together import by_main_process, of_main_process
from .weight_files import WeightFiles

if TYPE_CHECKING:
    from .view import TaskView, TrainerView


class ModelCheckpoint(Callback):
    """Keeps the newest and the best checkpoints of a run, each whole or absent whenever the process is killed.

    A checkpoint is a folder with the whole state, from which `fit(resume_from=...)` goes on; with
    `save_weights_only=True` it is one safetensors file. The newest is saved every so often, when the run ends in order
    or for a signal, and when an exception ends it after at least one step. With a monitor, each new value of the metric
    that is among the `top_k` best is saved with the weights that reached it: after the validation if validation logs
    the metric, else after the epoch. Of equal values the first stays; NaN and infinities are never best. Without a
    monitor the newest `top_k` are kept.

    The newest stays beside the best; where it is one of them, there is no second copy. One is removed only after its
    successor is whole, and only if this run wrote it, over all its legs; where something else has the name, `-v2` is
    put behind it. Nothing is written while a weight is NaN or infinite, with a warning. When `fit` begins it is made
    sure that the folder can be written to, and that no other living run writes into it. A fast dev run writes nothing.

    Of several processes the main one decides by its own values. Where a checkpoint can't be written, all of them fail
    with the same error.

    Args:
        every: when the newest is due, and the newest ones without a monitor; a bare number counts optimizer steps.
        monitor: the metric that says which weights are best, such as `"val/loss"`.
        mode: `"min"`: lower is better; `"max"`: higher is.
        top_k: how many of the best, or without a monitor of the newest, are kept; -1: all; 0: none.
        last: whether the newest is kept; with weights only, as `last.safetensors`.
        directory: where; by default `checkpoints` in the run's directory.
        filename: a template such as `"{epoch}-{val/loss:.2f}"`; see `FileName`. By default `"{step:06d}"`; for files of
            weights `best`, or with several `"{step}"` and the metric. What is saved without a new value of a metric in
            the template is named by its step.
        save_on_exception: whether the newest is saved when an exception ends the run; no whole state where another
            process failed, without which it could not go on exactly.
        save_weights_only: write files of weights, with which no run can be resumed.
        restore_best: load the best weights into the task when `fit` has ended in order.
        asynchronous: write whole states in the background, so that training waits only for the copy to the host. None:
            unless the device is the CPU.
    Raises:
        ConfigError: an argument can't be used or would be ignored, or nothing would ever be saved.
        CheckpointError: from `fit`: the folder can't be written to, another run writes into it, or a checkpoint can't
            be written.
    """

    steers = False

    def __init__(
        self,
        every: IntervalLike = "1 epoch",
        monitor: str | None = None,
        mode: Mode = "min",
        top_k: int = 1,
        last: bool = True,
        directory: str | Path | None = None,
        *,
        filename: str | None = None,
        save_on_exception: bool = True,
        save_weights_only: bool = False,
        restore_best: bool = False,
        asynchronous: bool | None = None,
    ) -> None:
        check_options(
            monitor=monitor,
            mode=mode,
            top_k=top_k,
            last=last,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            restore_best=restore_best,
            asynchronous=asynchronous,
        )
        self.interval = Interval.parse(every, unit="steps", option="ModelCheckpoint(every)")
        self.top_k = top_k
        self.last = last
        self.directory = read_directory(directory)
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.restore_best = restore_best
        self._monitor = None if monitor is None else Monitor(monitor, mode, owner="ModelCheckpoint")
        self.reads = () if monitor is None else (monitor,)
        self._rules = Rules(
            top_k=top_k,
            last=last,
            monitor=self._monitor,
            name=read_file_name(filename, monitor, top_k, save_weights_only),
            # Without a monitor, one unnamed newest file would be the same as `last`.
            names_newest=monitor is None and (filename is not None or top_k != 1 or not last),
            asynchronous=asynchronous,
        )
        self._is_active = False
        self._restored: Mapping[str, Any] | None = None
        self._claim: FolderClaim | None = None
        self._begin()

    @property
    def schedule(self) -> Interval | None:
        """When the newest is due, for the plan of a run."""
        return self.interval

    @property
    def checkpoint_folder(self) -> Path | None:
        """Where it keeps whole states, if that is not in the folder of the run."""
        return None if self.save_weights_only or self.directory is None else self.directory.absolute()

    @property
    def plan_note(self) -> str | None:
        """What is kept, and what is in it."""
        number = {-1: "all", 1: "the"}.get(self.top_k, f"the {self.top_k}")
        what = "newest" if self._monitor is None else f"best of {self._monitor.name}"
        kept = [f"{number} {what}"] if self.top_k else []
        if self.last and (self._monitor is not None or not self.top_k or self.save_weights_only):
            kept.append("the newest")
        held = "weights" if self.save_weights_only else "weights, optimizers, counters, random states, data position"
        return f"{' and '.join(dict.fromkeys(kept))}: {held}"

    def _begin(self) -> None:
        self._store: Store = WeightFiles(self._rules) if self.save_weights_only else StateFolders(self._rules)
        self._schedule: Schedule | None = None
        self._steps_seen = 0

    @property
    def last_path(self) -> Path | None:
        """The newest checkpoint that is kept, None before there is one; with weights only, the `last` file."""
        return self._store.last_path

    @property
    def best_path(self) -> Path | None:
        """The checkpoint of the best weights, None before there is a finite value and without a monitor."""
        best = self._store.kept.best
        return None if best is None else best.path

    @property
    def best_score(self) -> float | None:
        """The best value of the monitored metric, None as long as `best_path` is."""
        best = self._store.kept.best
        return None if best is None else best.score

    @property
    def kept(self) -> tuple[SavedCheckpoint, ...]:
        """What is kept, the best or newest first; then the newest, if it is none of the best. Without `last` files."""
        return tuple(self._store.kept.all)

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        state, self._restored = self._restored, None
        self._begin()
        self._is_active = not trainer.is_fast_dev_run
        self._steps_seen = _steps_due(trainer)
        self._schedule = Schedule(self.interval, trainer.state)
        if self._monitor is not None:
            self._monitor.start()
        if not self._is_active:
            return
        if self.restore_best:
            self._check_averages(trainer)
        folder = (self.directory or trainer.run_directory / "checkpoints").absolute()
        # What would fail at the first save fails before training.
        by_main_process(trainer, lambda: self._claim_folder(trainer, folder), "ModelCheckpoint: its folder")
        others = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each is not self]
        self._store.siblings = [each._store for each in others]
        self._store.key = next(key for key, each in state_keys(trainer.callbacks).items() if each is self)
        self._store.begin(trainer, folder, state)

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        # Not in `on_step`: the counters of batches and samples are up to date only here, where all processes come by,
        # also when another callback has ended the epoch or the run on one of them.
        if (steps := _steps_due(trainer)) != self._steps_seen:
            self._steps_seen = steps
            self._save_if_due(trainer)

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        if self._monitor is not None:
            self._monitor.note(metrics, step)

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        if self._monitor is not None and self._is_active:
            self._save_if_good(trainer, self._monitor.at_validation(trainer, metrics), metrics)

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        if self._monitor is not None and self._is_active:
            value = self._monitor.at_epoch_end(trainer, metrics)
            self._save_if_good(trainer, value, self._monitor.recorded_now(trainer, metrics))
        self._save_if_due(trainer)

    def on_stop(self, trainer: TrainerView, task: TaskView) -> None:
        if not self._is_active or not self._store.sees_end:
            return
        left = grace_left(trainer)
        if left is None or not self.last:
            self._store.save_at_end(trainer, is_due=self.interval.last)
        else:
            save_in_time(trainer, self._store, left)

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        if not self._is_active:
            return
        if trainer.error is not None:
            if self.save_on_exception and not self._is_of_peer(trainer.error):
                self._store.save_at_end(trainer, is_due=False)
        elif not self._store.sees_end:
            self._store.save_at_end(trainer, is_due=self.interval.last)

    def _is_of_peer(self, error: BaseException) -> bool:
        """Whether only another process failed, whose state is lost: from the newest whole one all go on exactly."""
        return isinstance(error, PeerFailedError) and self._store.sees_end

    def on_saved(self, trainer: TrainerView, task: TaskView, path: Path) -> None:
        if self._is_active:
            self._store.on_saved(trainer, path)

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        # The last event: what was being written in the background is whole by now.
        was_active, self._is_active = self._is_active, False
        claim, self._claim = self._claim, None
        try:
            if was_active and self.restore_best and trainer.error is None and trainer.signal is None:
                self._load_best(trainer)
        finally:
            if claim is not None:
                claim.release()

    def _save_if_due(self, trainer: TrainerView) -> None:
        if not self._is_active or trainer.error is not None or self._schedule is None:
            return
        if self._schedule.is_due(trainer.state):
            self._store.save_newest(trainer)

    def _save_if_good(self, trainer: TrainerView, value: float | None, metrics: Mapping[str, float]) -> None:
        if value is None:
            return
        own = [value, self._store.kept.accepts(value)]
        value, accepted = of_main_process(trainer, own, f"ModelCheckpoint: the value of {self.reads[0]}")
        self._store.save_scored(trainer, value, metrics, accepted=accepted)

    def _claim_folder(self, trainer: TrainerView, folder: Path) -> None:
        """Claim the folder, unless another callback of this run has it already. Local.

        Raises:
            CheckpointError: it can't be written to, or another run writes into it.
        """
        try:
            prove_writable(folder)
            claims = [c._claim for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c._claim is not None]
            if not (folder.exists() and any(os.path.samefile(claim.folder, folder) for claim in claims)):
                self._claim = FolderClaim(folder, trainer.run_id)
        except OSError as error:
            raise CheckpointError(
                f"ModelCheckpoint can't write to the folder {str(folder)!r}: {error}. Make it writable, or choose "
                "another one by directory=."
            ) from error

    def _check_averages(self, trainer: TrainerView) -> None:
        names = [
            type(each).__name__
            for each in trainer.callbacks
            if type(each).evaluation_weights is not Callback.evaluation_weights
        ]
        if names and not self.save_weights_only:
            raise ConfigError(
                f"ModelCheckpoint(restore_best=True): validation sees the weights of {', '.join(names)}, and whole "
                "states hold those of the training. Use save_weights_only=True, whose files hold what was validated."
            )

    def _load_best(self, trainer: TrainerView) -> None:
        if self.best_path is not None:
            with trainer.writing_weights():
                load_weights(trainer.unwrapped_model(), self.best_path)
        elif trainer.process.is_main_process:
            warnings.warn(
                f"ModelCheckpoint(restore_best=True): {self.reads[0]} had no finite value, so that there is no best "
                "one; the newest weights stay.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        monitor = self._monitor
        return {
            "store": self._store.state_dict(),
            "watched": None if monitor is None else [monitor.name, monitor.mode],
            "monitor": None if monitor is None else monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        if state["watched"] != own["watched"] or state["store"]["kind"] != own["store"]["kind"]:
            now, before = (f"{each['store']['kind']} by {each['watched']}" for each in (own, state))
            warnings.warn(
                f"ModelCheckpoint: the earlier leg kept {before}, and this one keeps {now}. It begins a new list; what "
                "the earlier one kept stays.",
                stacklevel=2,
            )
            return
        if self._monitor is not None:
            self._monitor.load_state_dict(state["monitor"])
        self._restored = state["store"]


def _steps_due(trainer: TrainerView) -> int:
    """The optimizer steps that were due so far, applied or not."""
    return trainer.state.step + trainer.state.skipped_steps
