"""`GatedScheduler`: a learning-rate scheduler that follows what became of the optimizer's steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from .gradient_state import GradientState
from .optimizer import GatedOptimizer

_CYCLED = ("lr", "momentum", "betas")
"""What OneCycleLR sets in a parameter group."""


class GatedScheduler:
    """Steps its scheduler only where the optimizers did; the rule is Accelerate's.

    Args:
        scheduler: any object with `step`, `state_dict` and `load_state_dict`.
        optimizers: those it waits for; without any it is never held back.
        gradient_state: of the owning `Accelerator`.
        steps_per_call: schedule steps for each effective call: the number of processes under Accelerate's rule, whose
            schedules are planned for the unsharded loader; 1 where they are planned in optimizer steps.
        step_with_optimizer: False: the scheduler steps whenever it is asked to.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[GatedOptimizer],
        gradient_state: GradientState,
        *,
        steps_per_call: int = 1,
        step_with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.gradient_state = gradient_state
        self.steps_per_call = steps_per_call
        self.step_with_optimizer = step_with_optimizer
        self.accumulated_calls = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizers' last steps were applied; while gradients accumulate, do nothing.

        With `GradientAccumulationPlugin(adjust_scheduler=True)` the calls that did nothing are made up for.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            self.accumulated_calls += 1
        else:
            calls = 1 + self.accumulated_calls if self.gradient_state.adjust_scheduler else 1
            self.accumulated_calls = 0
            if any(optimizer.step_was_skipped for optimizer in self.optimizers):
                return
            # One that is given a metric or an epoch has nothing new to see at a second call.
            for _ in range(1 if args or kwargs else calls * self.steps_per_call):
                self._step_within_total(*args, **kwargs)

    def _step_within_total(self, *args: Any, **kwargs: Any) -> None:
        # A schedule with a hard end (OneCycleLR) raises when it is stepped past it, as rounding may do.
        total = getattr(self.scheduler, "total_steps", None)
        if total is None or self.scheduler.last_epoch + 1 < total:
            self.scheduler.step(*args, **kwargs)
        elif self.scheduler.last_epoch < total:
            with _held_at_the_end(self.scheduler):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The newest learning rate of each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[float]:
        """The learning rates that torch's schedulers compute for their next step."""
        rates: list[float] = self.scheduler.get_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, with its planned length: a schedule that was begun is not stretched.

        Warns where the scheduler was built for another length than the state's.
        """
        planned = planned_length(self.scheduler)
        self.scheduler.load_state_dict(dict(state))
        kept = planned_length(self.scheduler)
        if planned != kept:
            warnings.warn(
                f"{type(self.scheduler).__name__} was built for {planned} steps, but its state comes from a schedule of"
                f" {kept}, which goes on. For another length, build the schedule anew and leave its state out.",
                stacklevel=2,
            )


@contextmanager
def _held_at_the_end(scheduler: Any) -> Iterator[None]:
    """A context in which torch's OneCycleLR, stepped once more than it has planned, keeps what it has set.

    Its last planned value is that of step `total_steps - 1`; at `total_steps` it goes on along its curve, which rises.
    """
    if not isinstance(scheduler, OneCycleLR):
        yield
        return
    groups = scheduler.optimizer.param_groups
    kept = [{name: _copied(group[name]) for name in _CYCLED if name in group} for group in groups]
    yield
    for group, values in zip(groups, kept, strict=True):
        for name, value in values.items():
            if isinstance(group[name], Tensor):
                group[name].fill_(value)
            else:
                group[name] = value
    scheduler._last_lr = [_copied(group["lr"]) for group in groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def planned_length(scheduler: Any) -> int | None:
    """The steps of its own after which a schedule ends, None where it has no end."""
    for name in ("total_steps", "T_max", "total_iters"):
        length = getattr(scheduler, name, None)
        if isinstance(length, int):
            return length
    return None
