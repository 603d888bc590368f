"""Buffers of a model, which a checkpoint keeps for each process where they are not the same on all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict has. Local."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put back what `saved_buffers` gave. Local."""
    own = dict(model.named_buffers())
    with torch.no_grad():
        for name in saved.keys() & own.keys():
            own[name].copy_(saved[name])
