"""What looks wrong in a run before it begins."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator

from ..callbacks.bus import unheard_methods
from ..distributed.errors import TaskError
from ..strategies.scheduler import planned_length
from .optimization import SchedulerConfig
from .run import Run, Training
from .task import Task


def check_schedules(training: Training) -> None:
    """A schedule with a hard end must last as long as the run.

    Raises:
        TaskError: torch would raise in the middle of the run.
    """
    for rate in training.schedulers:
        steps = planned_steps(training) if rate.interval == "step" else planned_epochs(training)
        if steps is not None and is_too_short(rate, steps):
            raise TaskError(
                f"{type(rate.scheduler).__name__} ends after {rate.scheduler.total_steps} steps of its own, but the "
                f"run gives it {steps // rate.frequency}. Build it for as many."
            )


def is_too_short(rate: SchedulerConfig, count: int) -> bool:
    """Whether a schedule with a hard end is over before so many steps or epochs."""
    total = getattr(rate.scheduler, "total_steps", None)
    return isinstance(total, int) and planned_length(rate.scheduler) == total and count // rate.frequency > total


def planned_epochs(training: Training) -> int | None:
    """Whole epochs of the run, None where another limit may end it."""
    limits = training.limits
    is_only = limits.max_epochs is not None and limits.durations == (limits.max_epochs,)
    return int(limits.max_epochs.amount) if is_only and limits.max_epochs is not None else None


def planned_steps(training: Training) -> int | None:
    """Optimizer steps of the run, None where they can't be known before."""
    limits, size, batches = training.limits, training.window_size, training.num_batches
    if limits.durations == (limits.max_steps,) and limits.max_steps is not None and limits.max_steps.unit == "steps":
        return int(limits.max_steps.amount)
    epochs = planned_epochs(training)
    if epochs is None or batches is None:
        return None
    if training.remainder == "carry":
        return math.ceil(epochs * batches / size)
    return epochs * (batches // size if training.remainder == "drop" else math.ceil(batches / size))


def unheard_events(run: Run) -> list[str]:
    """What to say of methods of the task and the callbacks that look like events and are never called."""
    listeners = {id(listener): listener for listener in (run.task, *run.callbacks)}.values()
    return [text for listener in listeners for text in unheard_methods(listener)]


def likely_mistakes(run: Run, training: Training) -> list[str]:
    """What looks wrong in a run that is about to begin: events that nobody fires, names that nothing logs."""
    provided = {name for callback in run.callbacks for name in callback.provides}
    known = provided | set(_text_constants(type(run.task)))
    found = unheard_events(run)
    wanted = {name: type(c).__name__ for c in run.callbacks for name in c.reads}
    wanted |= {rate.monitor: type(rate.scheduler).__name__ for rate in training.schedulers if rate.monitor}
    for name, reader in wanted.items():
        stem = name.removesuffix("_epoch").removesuffix("_step").partition("/dataloader_idx_")[0]
        if not {name, stem} & known and not any(_is_part(text, stem) for text in known):
            found.append(
                f"{reader} watches {name!r}, a name that neither a callback provides nor the task's code holds."
            )
    return found


def _is_part(text: str, name: str) -> bool:
    """Whether a text of the code may be the constant part of an f-string that makes the name."""
    return len(text) >= 4 and ("/" in text or "_" in text) and (name.startswith(text) or name.endswith(text))


def _text_constants(cls: type) -> Iterator[str]:
    """Every text in the code of a class and its bases, as far as `Task`: names of metrics are among them."""
    for base in cls.__mro__:
        if base is Task:
            return
        for member in vars(base).values():
            if isinstance(member, types.FunctionType):
                yield from _constants_of(member.__code__)


def _constants_of(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (part for part in constant if isinstance(part, str))
        elif isinstance(constant, types.CodeType):
            yield from _constants_of(constant)
