"""`Timer`: how long each stage took, and a limit on it."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

from ..distributed.errors import ConfigError, suggest
from .callback import Callback
from .intervals import Duration

if TYPE_CHECKING:
    from ..strategies.outcome import StepOutcome
    from .view import TaskView, TrainerView

STAGES = ("fit", "train", "validation", "test", "predict")
"""`fit` is training with its validations, `train` training without them."""


class Timer(Callback):
    """Measures the stages, in seconds of wall-clock time, over all runs of this object and a resume's earlier legs.

    Args:
        duration: the longest time that `fit` may take; the run then ends in order at the next step. A number of
            seconds, a text such as `"30 min"`, or a timedelta. Without it, no step costs anything. Of several processes
            the first whose clock says so ends the run for all, one step later.
    Raises:
        ConfigError: the duration can't be read, or is not a time.
    """

    steers = False
    """It only asks for the end of the run, which several processes then agree on at their next step boundary."""

    def __init__(self, duration: int | float | str | datetime.timedelta | None = None) -> None:
        self._limit = None if duration is None else Duration.parse(duration, unit="seconds", option="Timer(duration)")
        if self._limit is not None:
            if self._limit.unit != "seconds":
                raise ConfigError(
                    f"Timer(duration={duration!r}) counts {self._limit.unit}. Expected a time such as '30 min'; "
                    "for other limits use Trainer(max_steps=...) or Trainer(max_epochs=...)."
                )
            # The bus binds what an object has of its own, so that a timer without a limit is not called at each step.
            vars(self)["on_step"] = self._stop_when_over
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._since: dict[str, float] = {}

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds that a stage has taken so far.

        Args:
            stage: "fit", "train" (that without its validations), "validation", "test" or "predict".
        Raises:
            ConfigError: the stage is unknown.
        """
        if stage not in STAGES:
            raise ConfigError(f"stage={stage!r} is unknown. {suggest(stage, STAGES)}")
        running = time.monotonic() - self._since[stage] if stage in self._since else 0.0
        return self._seconds[stage] + running

    def time_remaining(self) -> float | None:
        """Seconds until the limit, None without one."""
        return None if self._limit is None else max(0.0, self._limit.amount - self.time_elapsed("fit"))

    def state_dict(self) -> dict[str, Any]:
        """The seconds of each stage."""
        return {"seconds": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the seconds of an earlier leg."""
        self._seconds = {**dict.fromkeys(STAGES, 0.0), **state["seconds"]}

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start measuring."""
        self._start("fit")
        self._start("train")

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Stop measuring."""
        self._stop("train")
        self._stop("fit")

    def on_validation_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Training stands still."""
        self._stop("train")
        self._start("validation")

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """Training goes on."""
        self._stop("validation")
        if "fit" in self._since:
            self._start("train")

    def on_test_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start measuring."""
        self._start("test")

    def on_test_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """Stop measuring."""
        self._stop("test")

    def on_predict_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start measuring."""
        self._start("predict")

    def on_predict_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Stop measuring."""
        self._stop("predict")

    def _start(self, stage: str) -> None:
        self._since[stage] = time.monotonic()

    def _stop(self, stage: str) -> None:
        since = self._since.pop(stage, None)
        if since is not None:
            self._seconds[stage] += time.monotonic() - since

    def _stop_when_over(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        if self.time_remaining() == 0.0 and trainer.stop_reason is None:
            taken = datetime.timedelta(seconds=round(self.time_elapsed("fit")))
            trainer.stop(f"Timer: the run has taken {taken}, its limit is {self._limit}")
