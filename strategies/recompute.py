"""Activation checkpointing: a module's forward that keeps its inputs alone, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class RecomputedForward:
    """The `forward` of one module, whose activations are computed a second time in backward instead of kept.

    It reaches the module by a reference of its own, so that a copy of the module runs the copy's weights.

    Args:
        module: whose forward this is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        """What the module had instead of its class's forward, None where it had nothing."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward; `inspect.signature` looks here."""
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return self.replaced or own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # here: importing it takes long

        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module) -> None:
    """Let a module's forward passes keep no activations, in place. One that does so already is left as it is. Local."""
    if not isinstance(module.__dict__.get("forward"), RecomputedForward):
        module.forward = RecomputedForward(module)
