"""Gradients that a pipeline has added up: averaged over others, and whether any has overflowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.finite import tensor_norms
from ..distributed import watch
from ..distributed.errors import ConfigError
from .averaging import average_gradients
from .sharded_gradients import local_gradients


def average_over_copies(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of a stage over the processes that have it. Collective among them.

    Raises:
        ConfigError: a gradient is sparse.
    """
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise ConfigError(
            "strategy='pipeline' with copies averages gradients over them, and that of an embedding is sparse. Make it "
            "with sparse=False, or use one pipeline."
        )
    average_gradients(parameters, "averaging of gradients", group)


def agree_on_overflow(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Let a gradient of this process be infinite if one is not finite in any other, so that all drop the step of fp16.
    Collective: one small reduction.

    Args:
        parameters: the trainable ones of this process, one at least.
        group: the processes; None: all.
        device: where they compute.
    """
    if all(parameter.grad is None for parameter in parameters):
        parameters[0].grad = torch.zeros_like(parameters[0])
    gradients = [each for each in local_gradients(parameters) if each.numel()]
    overflow = torch.zeros((), device=device)
    if gradients:
        overflow = (~torch.stack(tensor_norms(gradients, math.inf)).isfinite()).any().float().to(device)
    with watch.collective("overflow of gradients"):
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
    if gradients:
        gradients[0].mul_(torch.where(overflow > 0, math.inf, 1.0))
