"""Gradients of which each process has a part: their parts, and their norm over all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..checkpoint.sharded import local_part
from .sharded_norms import whole_norms


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts of the gradients that there are."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`: parts on any meshes, and whole ones. Collective.

    Returns:
        The norm before, a scalar on the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(whole_norms(gradients, norm_type, device)), norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts = [local_part(gradient) for gradient in gradients]
    torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm
