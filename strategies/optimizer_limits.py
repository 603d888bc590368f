"""Optimizers that can't step where a process has a part of each weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError

_OF_WHOLE_WEIGHTS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.Rprop)
"""Optimizers whose arithmetic torch does not have for weights in parts: norms and products of whole ones, and writing
into single elements."""
_NOT_FUSED = (torch.optim.Adagrad, torch.optim.SGD)
"""Optimizers with `fused=True` that torch has for whole weights alone."""


def check_steps_parts(optimizers: Iterable[Optimizer], strategy: str) -> None:
    """Refuse optimizers that torch can't step on parts of weights. Local.

    Args:
        optimizers: of any classes; those that are not torch's are let through.
        strategy: its name, for the message.
    Raises:
        ConfigError: says which, and what to use in its place.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, _OF_WHOLE_WEIGHTS):
            raise ConfigError(
                f"{name} computes with whole weights, and torch can't step it on parts of them, which strategy="
                f"{strategy!r} gives each process. Use an optimizer that computes each number by itself, such as AdamW,"
                " or strategy='ddp'."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"{name} needs sparse gradients, which strategy={strategy!r} can't reduce. Use dense ones with AdamW, "
                "or strategy='ddp'."
            )
        if isinstance(optimizer, _NOT_FUSED) and any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigError(
                f"{name}(fused=True) can't step parts of weights, which strategy={strategy!r} gives each process. "
                "Leave fused out."
            )


def step_apart(optimizer: Optimizer, others: Iterable[Tensor] = ()) -> None:
    """Let a group that has parts of some weights and others whole step them one after another. Local.

    torch steps all of a group in one operation on accelerators, unless it is told otherwise, and can't do that here.

    Args:
        optimizer: one of torch's.
        others: parameters of other processes, which are never stepped here.
    Raises:
        ConfigError: the group asks for that.
    """
    left = {id(parameter) for parameter in others}
    for group in optimizer.param_groups:
        if len({is_sharded(parameter) for parameter in group["params"] if id(parameter) not in left}) < 2:
            continue
        asked = next((way for way in ("foreach", "fused") if group.get(way)), None)
        if asked is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}({asked}=True) steps all parameters of a group at once, and this one has "
                "weights in parts and whole ones (of ignored_modules, or without a dimension). Leave "
                f"{asked} out, or put the latter into a group of their own."
            )
        if "foreach" in group:
            group["foreach"] = False
