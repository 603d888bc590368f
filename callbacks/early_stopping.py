"""`EarlyStopping`: ends the run when a metric has stopped getting better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..distributed.errors import check_boolean, check_integer, check_number
from .callback import Callback
from .monitor import Mode, Monitor

if TYPE_CHECKING:
    from .view import TaskView, TrainerView


class EarlyStopping(Callback):
    """Ends the run when a metric has not improved for a number of checks.

    A check is made after each validation if validation logs the metric, else after each epoch. The value must beat the
    best one accepted so far by more than `min_delta`; gains below that do not move the best value, so that slow steady
    progress counts once it adds up. The run ends in order at the next step boundary; `trainer.stop_reason` says why.

    A run that is resumed goes on with the count and the best value, and one that had stopped stays stopped, unless
    `patience` was raised. A new fit begins anew.

    Args:
        monitor: the metric's name, such as `"val/loss"`.
        mode: `"min"`: lower is better; `"max"`: higher is.
        patience: checks without an improvement after which the run ends.
        min_delta: an improvement is larger than this, in the metric's units.
        stopping_threshold: end at once when the metric is as good as this.
        divergence_threshold: end at once when the metric is worse than this.
        check_finite: end at once when the metric is NaN or infinite. False: such a value counts as no improvement.
    Raises:
        ConfigError: an argument can't be used.
    """

    def __init__(
        self,
        monitor: str,
        mode: Mode = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = True,
    ) -> None:
        self._monitor = Monitor(monitor, mode, min_delta, owner="EarlyStopping")
        check_integer("EarlyStopping(patience)", patience, 1, "It counts checks, not epochs.")
        for option, threshold in (
            ("stopping_threshold", stopping_threshold),
            ("divergence_threshold", divergence_threshold),
        ):
            if threshold is not None:
                hint = "It is a value of the metric; leave it out for none."
                check_number(f"EarlyStopping({option})", threshold, hint=hint)
        check_boolean("EarlyStopping(check_finite)", check_finite)
        self.reads = (monitor,)
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_finite = check_finite
        self._is_fitting = False
        self._is_restored = False
        self._begin()

    def _begin(self) -> None:
        self.best_score: float | None = None
        """The best value accepted so far, None before the first finite one."""
        self.best_step: int | None = None
        """The optimizer step at which it was seen."""
        self.wait = 0
        """Checks since then."""
        self.stop_reason: str | None = None
        """Why this callback ended the run, None while it has not."""
        self._ran_out = False

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        if not self._is_restored:
            self._begin()
        self._is_restored = False
        self._is_fitting = True
        self._monitor.start()
        if self._ran_out and self.wait < self.patience:  # patience was raised since
            self.stop_reason = None
        if self.stop_reason is not None:
            trainer.stop(f"EarlyStopping had stopped this run before: {self.stop_reason}")

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        self._monitor.note(metrics, step)

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        if self._is_fitting:
            self._check(trainer, self._monitor.at_validation(trainer, metrics))

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        self._check(trainer, self._monitor.at_epoch_end(trainer, metrics))

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        self._is_fitting = False

    def _check(self, trainer: TrainerView, value: float | None) -> None:
        if value is None:
            return
        if self._monitor.is_better(value, self.best_score):
            self.best_score, self.best_step, self.wait = value, trainer.state.step, 0
        else:
            self.wait += 1
        self.stop_reason = self._reason_to_stop(value)
        if self.stop_reason is not None:
            trainer.stop(f"EarlyStopping: {self.stop_reason}")

    def _reason_to_stop(self, value: float) -> str | None:
        name = self._monitor.name
        if self.check_finite and not math.isfinite(value):
            return f"{name} is {value}"
        if self.stopping_threshold is not None and self._monitor.reaches(value, self.stopping_threshold):
            return f"{name} = {value:g} has reached the threshold {self.stopping_threshold:g}"
        limit = self.divergence_threshold
        if limit is not None and self._monitor.is_worse(value, limit):
            return f"{name} = {value:g} is worse than the threshold {limit:g}"
        self._ran_out = self.wait >= self.patience
        if self._ran_out:
            best = "" if self.best_score is None else f"; the best was {self.best_score:g} at step {self.best_step}"
            gain = f" by more than {self._monitor.min_delta:g}" if self._monitor.min_delta else ""
            return f"{name} has not improved{gain} in {self.wait} checks{best}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "wait": self.wait,
            "stop_reason": self.stop_reason,
            "ran_out": self._ran_out,
            "monitor": self._monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_score, self.best_step = state["best_score"], state["best_step"]
        self.wait, self.stop_reason, self._ran_out = state["wait"], state["stop_reason"], state["ran_out"]
        self._monitor.load_state_dict(state["monitor"])
        self._is_restored = True
