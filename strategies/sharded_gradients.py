"""Gradients of which each process has a part: their parts, and their norm over all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.sharded import is_sharded, local_part


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts of the gradients that there are."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale gradients, sharded ones and whole ones, so that their global norm is at most `max_norm`. Collective.

    Returns:
        The norm before, a scalar on the device.
    """
    chosen = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [p.grad for p in chosen if is_sharded(p.grad) and p.grad is not None]
    others = [p.grad for p in chosen if not is_sharded(p.grad) and p.grad is not None]
    norms = []
    if sharded:
        total: Any = torch.nn.utils.get_total_norm(sharded, norm_type)
        norms.append(total.full_tensor().to(device))
    if others:
        norms.append(torch.nn.utils.get_total_norm(others, norm_type).to(device))
    if not norms:
        return torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = local_gradients(chosen)
    torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm
