"""Norms of tensors of which each process has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.finite import tensor_norms
from ..checkpoint.flat import FlatPart
from ..checkpoint.sharded import is_sharded, local_part
from ..distributed import watch


def whole_norms(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> list[Tensor]:
    """The norm of each tensor over all of its parts. Collective: one small reduction for each axis of parts.

    Args:
        tensors: floating-point, sharded or whole, the same ones in the same order on all processes.
        norm_type: the order of the norm; `math.inf` gives the largest absolute value.
        device: where processes reduce.
    Returns:
        Scalars on the device, in float32 or wider.
    """
    parts = [local_part(tensor.detach()) for tensor in tensors]
    filled = {index: part for index, part in enumerate(parts) if part.numel() > 0}
    found = dict(zip(filled, tensor_norms(filled.values(), norm_type), strict=True))
    empty = torch.zeros((), device=device)
    norms = [found[index].to(device) if index in found else empty for index in range(len(parts))]
    for (mesh, axes), indices in _alike(tensors).items():
        joint = _reduced(torch.stack([norms[index] for index in indices]), norm_type, mesh, axes)
        for index, norm in zip(indices, joint.unbind(), strict=True):
            norms[index] = norm
    return norms


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[Any, tuple[int, ...]], list[int]]:
    """The sharded tensors, by their meshes and the axes of these over which they are cut. Flat parts have no mesh, and
    are cut over all processes.
    """
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, FlatPart):
            groups.setdefault((None, (0,)), []).append(index)
        elif is_sharded(tensor):
            sharded: Any = tensor
            axes = tuple(axis for axis, place in enumerate(sharded.placements) if not place.is_replicate())
            groups.setdefault((sharded.device_mesh, axes), []).append(index)
    return groups


def _reduced(norms: Tensor, norm_type: float, mesh: Any, axes: Sequence[int]) -> Tensor:
    """Norms of parts made norms of the whole, in one reduction for each axis. Collective."""
    is_largest = math.isinf(norm_type)
    values = norms if is_largest else norms.pow(norm_type)
    with watch.collective("norms of gradients"):
        for axis in axes:
            operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            dist.all_reduce(values, operation, group=None if mesh is None else mesh.get_group(axis))
    return values if is_largest else values.pow(1 / norm_type)
