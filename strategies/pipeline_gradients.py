"""Gradients that a pipeline has added up: with which weight, and whether any has overflowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.finite import tensor_norms
from ..distributed import watch
from ..distributed.errors import ConfigError, TaskError
from .averaging import average_gradients
from .sharded_gradients import local_gradients


def weight_of(loss: Tensor, pending: Tensor | None) -> float:
    """What a loss is multiplied with in the one that backward begins from. Local.

    Args:
        loss: a scalar that was made of `pending` alone.
        pending: what `run_pipeline` gave, a scalar whose gradients were computed; None: nothing.
    Raises:
        TaskError: it was made of other things, whose gradients nobody has.
    """
    if loss is pending:
        return 1.0
    if pending is None or _leaves(loss) != {id(pending)}:
        raise TaskError(
            "training_step returned another loss than self.run_pipeline(batch) gave, and with strategy='pipeline' "
            "gradients are computed there. Return that one, or a multiple of it; put what is to be added into "
            "pipeline_loss."
        )
    return float(torch.autograd.grad(loss, pending)[0])


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


def _leaves(loss: Tensor) -> set[int]:
    """The tensors that backward from a loss comes to, by `id`. Local."""
    if loss.grad_fn is None:
        return {id(loss)}
    found: set[int] = set()
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return found
