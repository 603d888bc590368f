"""Tensors of which each process holds a part (DTensors): told apart from others, put together, and filled."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor. Local."""
    # Nobody has made one where their module was never imported, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory; a whole tensor itself. Local."""
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on this process's device; a whole tensor itself. Collective for a sharded one."""
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor() if is_sharded(tensor) else tensor
    return full


def fill_part(sharded: Tensor, values: Tensor) -> Tensor:
    """Put this process's part of a whole tensor's values into a sharded one of the same shape. Local.

    Returns:
        The sharded tensor.
    """
    from torch.distributed.tensor import distribute_tensor  # here: only who has sharded tensors needs it

    target: Any = sharded
    with torch.no_grad():
        # Without a source nothing is sent: each process cuts its part out of what it has.
        part = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    return sharded
