"""`ModelCheckpoint`: the last and the best weights of a run, as safetensors files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ..checkpoint.finite import find_nonfinite_weight
from ..distributed.errors import CheckpointError, ConfigError, check_boolean, check_integer
from ..distributed.paths import prove_writable
from .callback import Callback
from .file_names import SUFFIX, FileName
from .intervals import Interval, IntervalLike, Schedule
from .kept_files import KeptFiles, SavedFile
from .monitor import Mode, Monitor
from .own_files import OwnFiles
from .together import of_main_process

if TYPE_CHECKING:
    from .view import TaskView, TrainerView


class ModelCheckpoint(Callback):
    """Keeps the last and the best weights of a run, each in a file that is whole or absent.

    `last.safetensors` is written every so often, at the end of `fit`, and when an exception ends it after at least one
    step. With a monitor, each new value of the metric that is among the `top_k` best is saved with the weights that
    reached it: after the validation if validation logs the metric, else after the epoch. Of equal values the first
    stays; NaN and infinities are never best. Without a monitor the newest `top_k` files are kept.

    Weights that hold a NaN or an infinity are not written, with a warning, so that the good files stay. A file is
    removed only after its successor is whole, and only if this run wrote it; where a file of another run has the name,
    `-v2` is put behind it. When `fit` begins it is made sure that the folder can be written to. A fast dev run writes
    nothing.

    Of several processes the main one decides by its own values, and writes. The others wait until the file is whole,
    then know its path; where it can't be written, all of them fail with the same error.

    Args:
        every: when `last` is due, and the newest files without a monitor; a bare number counts optimizer steps.
        monitor: the metric that says which weights are best, such as `"val/loss"`.
        mode: `"min"`: lower is better; `"max"`: higher is.
        top_k: how many files of the best, or without a monitor of the newest, are kept; -1: all; 0: none.
        last: whether `last.safetensors` is kept.
        directory: where; by default `checkpoints` in the run's directory.
        filename: a template such as `"{epoch}-{val/loss:.2f}"`; see `FileName`. By default `best`, or with several
            files `"{step}"` and the metric.
        save_on_exception: whether `last` is written when an exception ends the run.
    Raises:
        ConfigError: an argument can't be used or would be ignored, or nothing would ever be saved.
        CheckpointError: from `fit`: the folder can't be written to, or a file can't be.
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
    ) -> None:
        check_integer("ModelCheckpoint(top_k)", top_k, -1, "It is a number of files; -1 keeps all, 0 none.")
        check_boolean("ModelCheckpoint(last)", last)
        check_boolean("ModelCheckpoint(save_on_exception)", save_on_exception)
        if monitor is None and mode != "min":
            raise ConfigError(f"ModelCheckpoint(mode={mode!r}) has no metric to compare. Name it by monitor=.")
        if not last and top_k == 0:
            raise ConfigError("ModelCheckpoint(top_k=0, last=False) saves nothing. Keep one of them, or leave it out.")
        self.interval = Interval.parse(every, unit="steps", option="ModelCheckpoint(every)")
        self.top_k = top_k
        self.last = last
        self.directory = _read_directory(directory)
        self.save_on_exception = save_on_exception
        self._monitor = None if monitor is None else Monitor(monitor, mode, owner="ModelCheckpoint")
        self.reads = () if monitor is None else (monitor,)
        # Without a monitor, one unnamed newest file would be the same as `last`.
        self._keeps_newest = monitor is None and (filename is not None or top_k != 1 or not last)
        self._name = _file_name(filename, monitor, top_k)
        self._is_active = False
        self._is_restored = False
        self._begin()

    @property
    def schedule(self) -> Interval:
        """When `last` is due, for the plan of a run."""
        return self.interval

    def _begin(self) -> None:
        self._kept = KeptFiles(self.top_k, self._monitor)
        self._own = OwnFiles("ModelCheckpoint")
        self._schedule: Schedule | None = None
        self._steps_seen = 0
        self._has_warned = False
        self._last_step = 0
        self.last_path: Path | None = None
        """The newest `last` file, None before it is written."""

    @property
    def best_path(self) -> Path | None:
        """The file of the best weights, None before there is a finite value and without a monitor."""
        return None if self._kept.best is None else self._kept.best.path

    @property
    def best_score(self) -> float | None:
        """The best value of the monitored metric, None as long as `best_path` is."""
        return None if self._kept.best is None else self._kept.best.score

    @property
    def kept(self) -> tuple[SavedFile, ...]:
        """The files that are kept, the best or newest first, without `last`."""
        return tuple(self._kept.files)

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        if not self._is_restored:
            self._begin()
        self._is_restored = False
        self._is_active = not trainer.is_fast_dev_run
        self._has_warned = False
        self._last_step = trainer.state.step
        self._steps_seen = _steps_due(trainer)
        self._schedule = Schedule(self.interval, trainer.state)
        if self._is_active and trainer.process.is_main_process:
            self._check_folder(self._folder(trainer))
        if self._monitor is not None:
            self._monitor.start()

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

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        if self._is_active and (self.save_on_exception or trainer.error is None):
            if self.interval.last and trainer.error is None:
                self._save_newest(trainer)
            self._save_last(trainer)
        self._is_active = False

    def _save_if_due(self, trainer: TrainerView) -> None:
        if not self._is_active or trainer.error is not None or self._schedule is None:
            return
        if self._schedule.is_due(trainer.state):
            self._save_newest(trainer)
            self._save_last(trainer)

    def _save_last(self, trainer: TrainerView) -> None:
        step = trainer.state.step
        if not self.last or step == self._last_step:  # written already, or nothing was trained yet
            return
        path = self._save(trainer, "last" + SUFFIX, self.last_path)
        if path is not None:
            self.last_path, self._last_step = path, step

    def _save_newest(self, trainer: TrainerView) -> None:
        is_new = not self._kept.files or self._kept.files[0].step != trainer.state.step
        if self._keeps_newest and is_new and self._kept.accepts(None):
            self._keep(trainer, None, {})

    def _save_if_good(self, trainer: TrainerView, value: float | None, metrics: Mapping[str, float]) -> None:
        if value is None:
            return
        value = of_main_process(trainer, value, f"ModelCheckpoint: the value of {self.reads[0]}")
        if self._kept.accepts(value):
            self._keep(trainer, value, metrics)

    def _keep(self, trainer: TrainerView, score: float | None, metrics: Mapping[str, float]) -> None:
        name = self._name.format(trainer.state, metrics)
        older = self._kept.files[0].path if self._name.is_fixed and self.top_k == 1 and self._kept.files else None
        path = self._save(trainer, name, older)
        if path is None:
            return
        for file in self._kept.add(SavedFile(path, trainer.state.step, score)):
            self._own.remove(file.path, self._folder(trainer), unlinks=trainer.process.is_main_process)

    def _save(self, trainer: TrainerView, name: str, older: Path | None) -> Path | None:
        """Write the weights, in the place of an older file if it is this run's. Collective, unless the run is failing.

        Returns:
            The file; None where nothing was written, since a weight is not finite.
        Raises:
            CheckpointError: on every process: the main one could not write.
        """
        is_main = trainer.process.is_main_process
        if not is_main and trainer.error is not None:
            return None  # who fails does not wait for others, and knows nothing of their files
        failure: CheckpointError | None = None
        told: dict[str, str] = {}
        if is_main:
            try:
                told = self._write(trainer, self._path(trainer, name, older))
            except CheckpointError as error:
                failure, told = error, {"error": str(error)}
        told = of_main_process(trainer, told, f"ModelCheckpoint: writing {name}")
        if "error" in told:
            raise failure or CheckpointError(told["error"])
        if "path" not in told:
            return None
        path = Path(told["path"])
        self._own.paths.add(path)
        return path

    def _write(self, trainer: TrainerView, path: Path) -> dict[str, str]:
        """Write the weights if they are finite. Local."""
        bad = find_nonfinite_weight(trainer.unwrapped_model())
        if bad is not None:
            self._warn_of(bad, trainer.state.step)
            return {}
        try:
            trainer.save_model(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"ModelCheckpoint could not write {str(path)!r} at step {trainer.state.step}: {error}. What was "
                "written before is whole. Make room there, or choose another folder by directory=."
            ) from error
        return {"path": str(path)}

    def _check_folder(self, folder: Path) -> None:
        """Fail before training what would otherwise fail at the first save."""
        try:
            prove_writable(folder)
        except OSError as error:
            raise CheckpointError(
                f"ModelCheckpoint can't write to the folder {str(folder)!r}: {error}. Make it writable, or choose "
                "another one by directory=."
            ) from error

    def _warn_of(self, weight: str, step: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ModelCheckpoint: {weight!r} is not finite at step {step}; nothing is written as long as this lasts, "
                "and the files of earlier steps stay. NaNGuard finds where it begins.",
                stacklevel=2,
            )

    def _path(self, trainer: TrainerView, name: str, older: Path | None) -> Path:
        """Where a file goes: in the place of its older one, or where no file is."""
        folder = self._folder(trainer)
        return older if older is not None and self._own.has(older, folder) else self._own.free_path(folder, name)

    def _folder(self, trainer: TrainerView) -> Path:
        return (self.directory or trainer.run_directory / "checkpoints").absolute()

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": self._kept.state_dict(),
            "written": sorted(map(str, self._own.paths)),
            "last_path": None if self.last_path is None else str(self.last_path),
            "monitor": None if self._monitor is None else self._monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin()
        for file in self._kept.load_state_dict(state["kept"]):
            warnings.warn(f"ModelCheckpoint: {str(file.path)!r} of step {file.step} is gone.", stacklevel=2)
        self._own.paths = {Path(path) for path in state["written"]}
        self.last_path = None if state["last_path"] is None else Path(state["last_path"])
        if self._monitor is not None and state["monitor"] is not None:
            self._monitor.load_state_dict(state["monitor"])
        self._is_restored = True


def _steps_due(trainer: TrainerView) -> int:
    """The optimizer steps that were due so far, applied or not."""
    return trainer.state.step + trainer.state.skipped_steps


def _read_directory(directory: str | Path | None) -> Path | None:
    if directory is None:
        return None
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise ConfigError(
            f"ModelCheckpoint(directory={directory!r}). Expected the path of a folder; leave it out for `checkpoints` "
            "in the run's directory."
        )
    return Path(directory)


def _file_name(template: str | None, monitor: str | None, top_k: int) -> FileName:
    if template is not None and (not isinstance(template, str) or not template):
        raise ConfigError(f"ModelCheckpoint(filename={template!r}). Expected a text, such as '{{epoch}}-{{step}}'.")
    if template is None and monitor is not None and top_k != 1:
        return FileName.of_metric(monitor)
    template = template or ("{step}" if monitor is None else "best")
    return FileName(template, metrics_allowed=monitor is not None, option="ModelCheckpoint(filename)")
