"""Activation checkpointing: a module's forward that keeps its inputs alone, and runs again in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .forward import ReplacedForward
from .precision import ContextFactory


class RecomputedForward(ReplacedForward):
    """A module's own forward, whose activations are computed a second time in backward instead of kept.

    Args:
        module: whose forward this is.
        keeping: gives the context in which its inputs are kept for that.
    """

    def __init__(self, module: nn.Module, keeping: ContextFactory = nullcontext) -> None:
        super().__init__(module)
        self.keeping = keeping

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # here: importing it takes long

        with self.keeping():  # what is saved inside of `checkpoint` has hooks of its own
            return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module, *, offloads: bool = False) -> None:
    """Let a module's forward passes keep no activations, in place. One that does so already is left as it is. Local.

    Args:
        module: any.
        offloads: keep its inputs on the host until backward; those that are given by name stay on the device.
    """
    if not isinstance(module.__dict__.get("forward"), RecomputedForward):
        module.forward = RecomputedForward(module, on_host if offloads else nullcontext)


def on_host() -> AbstractContextManager[Any]:
    """A context in which backward's tensors are kept on the host, in locked memory where there is an accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return torch.autograd.graph.save_on_cpu()
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device.type)
