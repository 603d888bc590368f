"""Optimizers and schedulers as a task configures them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..distributed.errors import MetricError, TaskError, suggest
from .task import Task


@dataclass(slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it steps; the keys of `configure_optimizers`' `"lr_scheduler"` mapping."""

    scheduler: Any
    """Any object with `step`."""
    interval: Literal["step", "epoch"] = "epoch"
    """What `frequency` counts: applied optimizer steps, or epochs."""
    frequency: int = 1
    """Steps of the scheduler are this far apart."""
    monitor: str | None = None
    """The metric that a plateau scheduler is given."""
    seen_at: int = field(default=-1, init=False)
    """The micro-step of the metric's value that the scheduler was given last."""

    def __post_init__(self) -> None:
        if not callable(getattr(self.scheduler, "step", None)):
            raise TaskError(f"lr_scheduler={self.scheduler!r} has no step(). Expected a learning-rate scheduler.")
        if self.interval not in ("step", "epoch"):
            raise TaskError(f"lr_scheduler interval={self.interval!r}. {suggest(self.interval, ('step', 'epoch'))}")
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int) or self.frequency < 1:
            raise TaskError(f"lr_scheduler frequency={self.frequency!r}. Expected an integer >= 1.")
        if self.needs_metric and self.monitor is None:
            raise TaskError(
                "ReduceLROnPlateau needs the metric it watches: return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val/loss'}}."
            )

    def is_point(self, count: int) -> bool:
        """Whether the scheduler steps at this number of steps or epochs."""
        return count % self.frequency == 0

    @property
    def needs_metric(self) -> bool:
        """Whether the scheduler steps by a metric's value."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


@dataclass(slots=True)
class Optimization:
    """What a task trains with."""

    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]


def configure(task: Task) -> Optimization:
    """Ask a task for its optimizers and check them.

    Raises:
        TaskError: what it returned can't be used; says what was expected.
    """
    found = _read(task.configure_optimizers(), task)
    if task.automatic_optimization and len(found.optimizers) != 1:
        raise TaskError(
            f"{type(task).__name__}.configure_optimizers returned {len(found.optimizers)} optimizers; automatic "
            "optimization steps exactly one. Return one, or set automatic_optimization = False and step them in "
            "training_step."
        )
    for optimizer in found.optimizers:
        _check_parameters(optimizer, task)
        if task.automatic_optimization:
            _check_step(optimizer)
    for rate in found.schedulers:
        owner = getattr(rate.scheduler, "optimizer", None)
        if isinstance(owner, Optimizer) and not any(owner is optimizer for optimizer in found.optimizers):
            raise TaskError(
                f"{type(rate.scheduler).__name__} moves the rates of another {type(owner).__name__} than those that "
                f"{type(task).__name__}.configure_optimizers returned. Build it on the returned optimizer."
            )
    return found


def _read(returned: Any, task: Task) -> Optimization:
    if returned is None:
        return Optimization([], [])
    if isinstance(returned, Optimizer):
        return Optimization([returned], [])
    if isinstance(returned, Mapping):
        return _read_mapping(returned, task)
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return _read_sequence(returned, task)
    raise _unusable(returned, task)


def _read_sequence(returned: Sequence[Any], task: Task) -> Optimization:
    """A pair of optimizer and scheduler, a pair of lists of them, or several of what `configure_optimizers` returns."""
    if len(returned) == 2 and isinstance(returned[0], Optimizer) and _is_scheduler(returned[1]):
        return Optimization([returned[0]], [_read_scheduler(returned[1])])
    if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
        optimizers, schedulers = returned
        return Optimization([_one(o, task) for o in optimizers], [_read_scheduler(s) for s in schedulers])
    parts = [_read(part, task) for part in returned]
    return Optimization([o for p in parts for o in p.optimizers], [s for p in parts for s in p.schedulers])


def _read_mapping(returned: Mapping[str, Any], task: Task) -> Optimization:
    unknown = set(returned) - {"optimizer", "lr_scheduler"}
    if unknown or "optimizer" not in returned:
        wrong = sorted(map(str, unknown))[0] if unknown else "(nothing)"
        raise TaskError(
            f"{type(task).__name__}.configure_optimizers returned a mapping with {sorted(map(str, returned))}. "
            f"{suggest(wrong, ('optimizer', 'lr_scheduler'))}"
        )
    scheduler = returned.get("lr_scheduler")
    schedulers = [] if scheduler is None else [_read_scheduler(scheduler)]
    return Optimization([_one(returned["optimizer"], task)], schedulers)


def _read_scheduler(given: Any) -> SchedulerConfig:
    if not isinstance(given, Mapping):
        return SchedulerConfig(given)
    known = {option.name for option in fields(SchedulerConfig) if option.init}
    if unknown := sorted(set(given) - known):
        raise TaskError(f"lr_scheduler has an unknown key {unknown[0]!r}. {suggest(unknown[0], known)}")
    if "scheduler" not in given:
        raise TaskError(f"lr_scheduler is a mapping without 'scheduler': {dict(given)!r}.")
    return SchedulerConfig(**given)


def _is_scheduler(given: Any) -> bool:
    if isinstance(given, Mapping):
        return "scheduler" in given
    return not isinstance(given, (Optimizer, list, tuple)) and callable(getattr(given, "step", None))


def _one(given: Any, task: Task) -> Optimizer:
    if not isinstance(given, Optimizer):
        raise _unusable(given, task)
    return given


def _unusable(returned: Any, task: Task) -> TaskError:
    return TaskError(
        f"{type(task).__name__}.configure_optimizers returned a {type(returned).__name__}. Expected a torch "
        "optimizer, a pair "
        "(optimizer, scheduler), or a mapping {'optimizer': ..., 'lr_scheduler': ...}."
    )


def _check_step(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise TaskError(
            f"{name}.step needs a closure that computes the loss again, which automatic optimization has not. Set "
            "automatic_optimization = False and call self.trainer.optimizers[0].step(closure) in training_step, or "
            "choose another optimizer."
        )


def _check_parameters(optimizer: Optimizer, task: Task) -> None:
    own = {id(parameter) for parameter in task.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [parameter for parameter in group["params"] if id(parameter) not in own]
        if foreign:
            raise TaskError(
                f"{type(optimizer).__name__} group {index} holds {len(foreign)} parameters that are not the task's, "
                f"such as one of shape {tuple(foreign[0].shape)}. Assign their module to an attribute of "
                f"{type(task).__name__}, and build the optimizer from self.parameters()."
            )


def monitored_value(rate: SchedulerConfig, metrics: Mapping[str, float]) -> float:
    """The newest value of the metric that a plateau scheduler watches.

    Raises:
        MetricError: it was never logged; lists those that were.
    """
    assert rate.monitor is not None
    if rate.monitor not in metrics:
        raise MetricError(f"lr_scheduler monitor={rate.monitor!r} was never logged. {suggest(rate.monitor, metrics)}")
    return metrics[rate.monitor]
