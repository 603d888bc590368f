"""`GatedOptimizer`: a torch optimizer whose steps follow the accumulation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..distributed.errors import ConfigError
from ..distributed.operations import reduce
from .outcome import StepOutcome

if TYPE_CHECKING:
    from .strategy import Strategy


class GatedOptimizer(Optimizer):
    """A torch optimizer that steps, and forgets its gradients, only where they synchronise.

    It shares `param_groups` and `state` with the optimizer it wraps, so that schedulers may be built on either.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Optimizer, strategy: Strategy) -> None:
        # Not Optimizer.__init__: groups and state are the wrapped optimizer's own.
        self.optimizer = optimizer
        self.strategy = strategy
        self.outcome = StepOutcome.ACCUMULATED
        """What became of the newest call of `step`."""
        self.before_step: Callable[[Optimizer], bool] | None = None
        """Called with the torch optimizer before each step that will be applied, its gradients unscaled; False drops
        it.
        """
        self._zero_grad_takes_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the newest step was dropped for an overflow."""
        return self.outcome is StepOutcome.SKIPPED

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if gradients synchronise, else do nothing.

        Args:
            closure: for optimizers that compute the loss several times in a step (LBFGS): clears the gradients, runs
                forward and `Accelerator.backward`, and returns the loss.
        Returns:
            What a step with a closure gives; else None.
        Raises:
            ConfigError: a closure was given, and gradients are accumulated or scaled.
        """
        if closure is not None:
            return self._step_with(closure)
        if self.before_step is not None and self.strategy.gradient_state.sync_gradients:
            will_apply = self.strategy.precision.unscale(self.optimizer)
            if will_apply and not self.before_step(self.optimizer):
                self.strategy.precision.forget(self.optimizer)
                self.outcome = StepOutcome.SKIPPED
                return None
        self.outcome = self.strategy.step(self.optimizer)
        return None

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        # Unscaled gradients: there is nothing for the strategy to do around the optimizer's own loop.
        state = self.strategy.gradient_state
        if state.num_steps != 1 or self.strategy.precision.scales:
            raise ConfigError(
                "optimizer.step(closure) was called, which neither accumulation nor the scaling of fp16 can serve. Use "
                "gradient_accumulation_steps=1 and mixed_precision 'no' or 'bf16', or step() without a closure."
            )
        if self.before_step is not None:
            raise ConfigError("optimizer.step(closure) can't be used in a Task. Call backward first, and step() alone.")
        result = self.optimizer.step(self._agreed(closure))
        self.outcome = StepOutcome.APPLIED
        return result

    def _agreed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with the mean of all processes' losses, so that searches by the loss end at one place."""
        if self.strategy.process.num_processes == 1:
            return closure

        def mean_over_processes() -> Any:
            return reduce(closure().detach(), reduction="mean")

        return mean_over_processes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients if they synchronise, else do nothing.

        Raises:
            ConfigError: `set_to_none=False` was asked of an optimizer that does not know it.
        """
        if not self.strategy.gradient_state.sync_gradients:
            return
        self.strategy.precision.forget(self.optimizer)
        if self._zero_grad_takes_none:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        elif set_to_none:
            self.optimizer.zero_grad()
        else:
            raise ConfigError(f"{type(self.optimizer).__name__}.zero_grad does not take set_to_none=False.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.optimizer.register_step_post_hook(hook)

    def train(self) -> None:
        """Forwarded to optimizers that have modes (schedule-free ones)."""
        if callable(train := getattr(self.optimizer, "train", None)):
            train()

    def eval(self) -> None:
        """Forwarded to optimizers that have modes (schedule-free ones)."""
        if callable(evaluate := getattr(self.optimizer, "eval", None)):
            evaluate()

    def __repr__(self) -> str:
        return f"GatedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "strategy": self.strategy, "outcome": self.outcome}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"], state["strategy"])  # type: ignore[misc]
        self.outcome = state["outcome"]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Bring an optimizer's state tensors to the devices of their parameters, after the model was moved."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != parameter.device and not _stays(optimizer, key, value):
                state[key] = value.to(parameter.device)


def _stays(optimizer: Optimizer, key: str, value: torch.Tensor) -> bool:
    # Step counters stay on the host unless the optimizer computes with them on the device.
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return key == "step" and not on_device
