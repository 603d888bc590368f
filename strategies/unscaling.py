"""Gradients of fp16 at their true size, between backward and the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..distributed.errors import ConfigError
from .optimizer import GatedOptimizer, parameters_of
from .strategy import Strategy


def unscale(strategy: Strategy, optimizers: Iterable[Optimizer]) -> None:
    """Unscale the gradients of optimizers that have some, once per step. Does nothing in other precisions.

    Raises:
        ConfigError: gradients are still being accumulated.
    """
    if not strategy.precision.scales:
        return
    if not strategy.gradient_state.sync_gradients:
        raise ConfigError(
            "gradients can't be unscaled or clipped while those of fp16 are accumulated: the micro-batches to come are "
            "scaled. Do it inside `if accelerator.sync_gradients:`."
        )
    for optimizer in optimizers:
        # One without gradients is left alone: it would count as unscaled when its own backward comes (a GAN's second).
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            inner = optimizer.optimizer if isinstance(optimizer, GatedOptimizer) else optimizer
            strategy.precision.unscale(inner)


def unscale_for(strategy: Strategy, parameters: Sequence[Tensor], optimizers: Iterable[Optimizer]) -> None:
    """Unscale the gradients of those optimizers that hold one of the parameters; as `unscale`."""
    if strategy.precision.scales:
        wanted = {id(parameter) for parameter in parameters}
        unscale(strategy, [o for o in optimizers if any(id(parameter) in wanted for parameter in parameters_of(o))])
