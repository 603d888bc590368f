"""Plain functions as handlers of events, with filters: `trainer.on("step", function, every=100)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..distributed.errors import ConfigError, check_boolean, suggest
from ..strategies.outcome import StepOutcome
from .bus import EVENTS, Event, Handler
from .callback import Callback
from .intervals import Interval, IntervalLike, Schedule
from .state import RunState

# Events that count in the run's own counters, so that a filter means the same after a resume.
_COUNTS: dict[str, Callable[[RunState], int]] = {
    "on_step": lambda state: state.step,
    "on_batch_start": lambda state: state.micro_step + 1,
    "on_before_backward": lambda state: state.micro_step + 1,
    "on_backward": lambda state: state.micro_step + 1,
    "on_before_step": lambda state: state.step + 1,
    "on_batch_end": lambda state: state.micro_step,
    "on_epoch_start": lambda state: state.epoch + 1,
    "on_epoch_end": lambda state: state.epoch + 1,
}


def find_event(name: str) -> Event:
    """The event of a name, with or without `on_`.

    Raises:
        ConfigError: there is no such event; lists those there are.
    """
    if not isinstance(name, str):
        raise ConfigError(f"event={name!r} of trainer.on. Expected a name such as 'step'. {suggest(name, EVENTS)}")
    full = name if name.startswith("on_") else f"on_{name}"
    if full not in EVENTS:
        raise ConfigError(f"event={name!r} is unknown. {suggest(full, EVENTS)}")
    return EVENTS[full]


@dataclass(slots=True)
class FilteredFunction:
    """A function that is called on some firings of one event.

    `every`, `once`, `before` and `after` count from 1: optimizer steps at `step` (of which one that is skipped is
    none), micro-batches at the events of a batch, epochs at those of an epoch, and firings in this run at all others.
    """

    event: Event
    function: Handler
    every: IntervalLike | None = None
    """Each n-th time, or an interval such as `"0.25 epoch"` or a list of these."""
    once: int | bool | None = None
    """The n-th time alone; True: the first time that the other filters let pass."""
    before: int | None = None
    """Only while the count is below this."""
    after: int | None = None
    """Only while the count is above this."""
    when: Callable[..., bool] | None = None
    """A predicate over the event's own arguments."""
    steers: bool = True
    """Whether it may skip a batch or a step, end the epoch, or stop the run; see `Callback.steers`."""
    _fired: int = 0
    _is_spent: bool = False
    _schedule: Schedule | None = None
    _interval: Interval | None = field(default=None, init=False)
    _only_applied: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._check_functions()
        check_boolean("trainer.on(steers)", self.steers)
        for option in ("every", "once", "before", "after"):
            value = getattr(self, option)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            is_free = value is None or option == "every" or (option == "once" and isinstance(value, bool))
            if not (is_count or is_free) or (is_count and value < 1):
                raise ConfigError(f"{option}={value!r} of trainer.on. Expected an integer >= 1; counts begin at 1.")
            self._only_applied |= value is not None and self.event is Callback.on_step
        if self.every is not None and (isinstance(self.every, bool) or not isinstance(self.every, int)):
            self._interval = Interval.parse(self.every, unit="steps", option="every")
            if self._interval.last:
                raise ConfigError("every='last' of trainer.on can't be known in advance. Use the event 'fit_end'.")

    def _check_functions(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"trainer.on({self.event.__name__.removeprefix('on_')!r}, {self.function!r}). Expected a function that "
                "is called with the trainer, the task and the event's values."
            )
        if self.when is not None and not callable(self.when):
            raise ConfigError(
                f"when={self.when!r} of trainer.on. Expected a function of the trainer, the task and the event's "
                "values that returns whether to call; for counts use every=, once=, before= or after=."
            )

    @property
    def label(self) -> str:
        """What errors and tables call this handler: the function's name, and of one without a name its place."""
        name = str(getattr(self.function, "__qualname__", self.function))
        code = getattr(self.function, "__code__", None)
        if code is None or not name.endswith("<lambda>"):
            return name
        return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"

    def reset(self, state: RunState) -> None:
        """Begin a run."""
        self._fired = 0
        self._is_spent = False
        if self._interval is not None:
            self._schedule = Schedule(self._interval, state)

    def __call__(self, trainer: Any, task: Any, *values: Any) -> None:
        if self._only_applied and values[0] is not StepOutcome.APPLIED:
            return
        self._fired += 1
        state: RunState = trainer.state
        count_of = _COUNTS.get(self.event.__name__)
        count = self._fired if count_of is None else count_of(state)
        if self._passes(count, state) and (self.when is None or self.when(trainer, task, *values)):
            self._is_spent = self.once is True
            self.function(trainer, task, *values)

    def _passes(self, count: int, state: RunState) -> bool:
        if self.before is not None and count >= self.before:
            return False
        if self.after is not None and count <= self.after:
            return False
        if self._is_spent or (type(self.once) is int and count != self.once):
            return False
        if self._schedule is not None:
            return self._schedule.is_due(state)
        return not isinstance(self.every, int) or count % self.every == 0
