"""What stands for an optimizer or a scheduler that DeepSpeed makes by its configuration; the names are Accelerate's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..distributed.errors import ConfigError

_SCHEDULER = "_loopwright_dummy_scheduler"
"""The attribute of an optimizer that holds its `DummyScheduler`."""


@final
class DummyOptim(Optimizer):
    """Stands for the optimizer of DeepSpeed's configuration, whose `"auto"` values it fills.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        weight_decay: of the weights.
        kwargs: further hyperparameters, such as betas and eps.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        given = [dict(entry) if isinstance(entry, Mapping) else entry for entry in params]
        self._explicit = [set(entry) for entry in given if isinstance(entry, dict)]
        """Of each group the hyperparameters that it was given for itself."""
        super().__init__(given, {"lr": lr, "weight_decay": weight_decay, **kwargs})
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs

    def explicit(self, index: int) -> dict[str, Any]:
        """The hyperparameters that a group was given for itself; the others are those of DeepSpeed's configuration."""
        names = self._explicit[index] - {"params"} if index < len(self._explicit) else set()
        return {name: self.param_groups[index][name] for name in names}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises ConfigError: DeepSpeed steps its own."""
        raise ConfigError(
            "DummyOptim can't step: it stands for the optimizer of DeepSpeed's config. Train with "
            "strategy='deepspeed' (Accelerator(deepspeed_plugin=...)), or use an optimizer of torch."
        )


@final
class DummyScheduler(LRScheduler):
    """Stands for the scheduler of DeepSpeed's configuration, which moves on with each optimizer step by itself.

    Args:
        optimizer: a `DummyOptim`, or the optimizer of the model.
        total_num_steps: optimizer steps of the whole schedule, for `"auto"`.
        warmup_num_steps: those of its beginning, for `"auto"`.
        lr_scheduler_callable: makes the scheduler for the optimizer that it is given, in place of the configuration.
        kwargs: Accelerate takes more, which have no effect.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Not LRScheduler.__init__: it would change the optimizer's learning rate.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self._scheduler: Any = None
        vars(optimizer)[_SCHEDULER] = self

    def attach(self, scheduler: Any) -> None:
        """Take the scheduler that DeepSpeed has made."""
        self._scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DeepSpeed has moved its scheduler on when the optimizer stepped."""

    def get_last_lr(self) -> list[float | Tensor]:
        """The newest learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of DeepSpeed's scheduler."""
        return {} if self._scheduler is None else dict(self._scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if self._scheduler is not None and state_dict:
            self._scheduler.load_state_dict(dict(state_dict))


def scheduler_of(optimizer: Optimizer) -> DummyScheduler | None:
    """The `DummyScheduler` that was made for an optimizer. Local."""
    found = vars(optimizer).get(_SCHEDULER)
    return found if isinstance(found, DummyScheduler) else None


def facts_of(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What fills `"auto"` in the sections `optimizer` and `scheduler`. Local."""
    scheduler = scheduler_of(optimizer)
    values = dict(optimizer.defaults) if isinstance(optimizer, DummyOptim) else {}
    filled = {"lr": None, "betas": None, "eps": None, "weight_decay": None, **values}
    lr = optimizer.param_groups[0].get("lr")
    if scheduler is None:
        return filled, {}
    steps = {"total_num_steps": scheduler.total_num_steps, "warmup_num_steps": scheduler.warmup_num_steps}
    return filled, {"warmup_min_lr": 0, "warmup_max_lr": None if lr is None else float(lr), **steps}
