"""`GarbageCollection`: Python's cyclic garbage collector off during steps, and run at moments of our choice."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from .callback import Callback
from .intervals import Interval, IntervalLike, Schedule

if TYPE_CHECKING:
    from ..strategies.outcome import StepOutcome
    from .view import TaskView, TrainerView


class GarbageCollection(Callback):
    """Keeps the garbage collector from interrupting steps, which it does on each process at another moment.

    It is off from the first step of an epoch to the validation or the epoch's end, and on in between, where loaders
    start their workers: those inherit the setting. While it is off, garbage is collected at each point of `every`.
    What exists when it goes off is set aside (`gc.freeze`), so that a collection looks only at what training made.
    Once training is over, everything is as it was before, also after an exception.

    Args:
        every: when to collect; a bare number counts optimizer steps.
    Raises:
        ConfigError: `every` can't be read.
    """

    steers = False

    def __init__(self, every: IntervalLike = "100 steps") -> None:
        self._every = Interval.parse(every, unit="steps", option="GarbageCollection(every)")
        self._schedule: Schedule | None = None
        self._is_off = False
        self._may_freeze = False

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Lay the interval over the run's counters."""
        self._schedule = Schedule(self._every, trainer.state)
        self._may_freeze = gc.get_freeze_count() == 0  # else somebody froze objects, and `unfreeze` would free theirs

    def on_step(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        """Off at the first step; a collection where one is due."""
        if gc.isenabled():
            self._switch_off()
        if self._schedule is not None and self._schedule.is_due(trainer.state):
            gc.collect()

    def on_validation_start(self, trainer: TrainerView, task: TaskView) -> None:
        """On again."""
        self._switch_on()

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """On again."""
        self._switch_on()

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        """As it was before."""
        self._switch_on()
        self._schedule = None

    def _switch_off(self) -> None:
        gc.collect(0)
        if self._may_freeze:
            gc.freeze()
        gc.disable()
        self._is_off = True

    def _switch_on(self) -> None:
        if not self._is_off:  # also where the collector was off before: then it stays off
            return
        gc.collect()
        if self._may_freeze:
            gc.unfreeze()
        gc.enable()
        self._is_off = False
