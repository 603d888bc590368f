"""Activation checkpointing: a module's forward that keeps its inputs alone, and runs again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .forward import ReplacedForward


class RecomputedForward(ReplacedForward):
    """A module's own forward, whose activations are computed a second time in backward instead of kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # here: importing it takes long

        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module) -> None:
    """Let a module's forward passes keep no activations, in place. One that does so already is left as it is. Local."""
    if not isinstance(module.__dict__.get("forward"), RecomputedForward):
        module.forward = RecomputedForward(module)
