"""Tensors of which each process holds a part (DTensors, `FlatPart`s): told apart from others, put together, filled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import boxes_of_range, index_of
from .flat import FlatPart

_LOOSE = (list, tuple, set, frozenset)
_WHOLE = (Tensor, torch.nn.Parameter)


class Part(NamedTuple):
    """A box of a tensor's elements that a process holds."""

    offset: tuple[int, ...]
    """Where the box begins in the whole tensor, per dimension."""
    values: Tensor
    """Its elements, in the memory of this process."""


def is_sharded(value: object) -> bool:
    """Whether a value is a tensor of which each process holds a part. Local."""
    return type(value) not in _WHOLE and isinstance(value, _kinds())


def holds_sharded(value: object) -> bool:
    """Whether there is such a tensor in nested mappings, lists and tuples. Local."""
    return _holds(value, _kinds())


def _kinds() -> tuple[type, ...]:
    # Nobody has made a DTensor where their module was never imported, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return (FlatPart,) if module is None else (FlatPart, module.DTensor)


def _holds(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, (Tensor, str, int, float)):
        return isinstance(value, kinds)
    if isinstance(value, Mapping):
        return any(_holds(each, kinds) for each in value.values())
    return isinstance(value, _LOOSE) and any(_holds(each, kinds) for each in value)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory; a whole tensor itself. Local."""
    if isinstance(tensor, FlatPart):
        return tensor.local
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on this process's device; a whole tensor itself. Collective for a sharded one."""
    if isinstance(tensor, FlatPart):
        return tensor.gathered()
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor() if is_sharded(tensor) else tensor
    return full


def parts_of(tensor: Tensor) -> list[Part]:
    """What this process holds of a tensor, where it belongs; a whole tensor as one part. Local.

    Raises:
        TypeError: the processes hold summands, which make a value only once they are added.
    """
    if not is_sharded(tensor):
        return [Part((0,) * tensor.dim(), tensor.detach())]
    if isinstance(tensor, FlatPart):
        return list(_flat_parts(tensor))
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise TypeError(f"its processes hold summands of it ({sharded.placements}); add them up first")
    local = sharded.to_local().detach()
    if sharded.device_mesh.get_coordinate() is None or local.numel() == 0:
        return []
    boxes = product(*_runs(sharded))
    return [Part(tuple(run.begin for run in box), _cut(local, box)) for box in boxes]


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this process is, of those that hold the same part of a sharded tensor, the one that stores it. Local."""
    if isinstance(tensor, FlatPart):
        return not tensor.is_copy
    sharded: Any = tensor
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    # Along an axis that the tensor knows nothing of, there are copies too. torch has no public way to the whole mesh.
    whole_mesh = mesh._get_root_mesh()
    if whole_mesh.size() > mesh.size() and whole_mesh.mesh.flatten()[0] not in mesh.mesh:
        return False
    places = zip(coordinate, sharded.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())


def fill_part(sharded: Tensor, values: Tensor) -> Tensor:
    """Put this process's part of a whole tensor's values into a sharded one of the same shape. Local.

    Returns:
        The sharded tensor.
    """
    with torch.no_grad():
        for part in parts_of(sharded):
            part.values.copy_(values[index_of(part.offset, part.values.shape)])
    return sharded


def part_like(sharded: Tensor, local: Tensor) -> Tensor:
    """A tensor that is sharded as another of its shape, of this process's part; a whole one is itself. Local.

    Args:
        sharded: the other.
        local: the part, on any device; it is the memory of the result where it is on the right one.
    """
    if not is_sharded(sharded):
        return local.to(sharded.device)
    if isinstance(sharded, FlatPart):
        return FlatPart(local.to(sharded.device), sharded.begin, sharded.shape, sharded.is_copy)
    from torch.distributed.tensor import DTensor

    like: Any = sharded
    place = like.device_mesh, like.placements
    part: Tensor = DTensor.from_local(
        local.to(like.to_local().device), *place, run_check=False, shape=like.shape, stride=like.stride()
    )
    return part


def _flat_parts(part: FlatPart) -> Iterator[Part]:
    """The boxes of a range, in the order of its elements."""
    place = 0
    for offset, shape in boxes_of_range(part.shape, part.begin, part.begin + len(part.local)):
        size = prod(shape)
        yield Part(offset, part.local[place : place + size].view(shape))
        place += size


class _Run(NamedTuple):
    """Neighbours along a dimension: where they begin in the whole tensor, where in the part, and how many they are."""

    begin: int
    place: int
    length: int


def _runs(sharded: Any) -> list[list[_Run]]:
    """Which indices this process has, for each dimension."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = sharded.placements
    if all(placement.is_replicate() or type(placement) is Shard for placement in placements):
        shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, placements)
        return [[_Run(begin, 0, length)] for begin, length in zip(offset, shape, strict=True)]
    return [list(_neighbours(_indices(sharded, dim))) for dim in range(sharded.dim())]


def _indices(sharded: Any, dim: int) -> list[int]:
    """The indices of a dimension that this process has, where they may be dealt out in strides."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    others = [each.is_replicate() or each.dim % sharded.dim() != dim for each in sharded.placements]
    alike = [Replicate() if is_other else each for is_other, each in zip(others, sharded.placements, strict=True)]
    numbers = torch.arange(sharded.shape[dim], device=sharded.device_mesh.device_type)
    numbers = numbers.view([-1 if each == dim else 1 for each in range(sharded.dim())])
    # Without a source nothing is sent: torch deals the numbers out as it has dealt the values.
    found: Any = distribute_tensor(numbers, sharded.device_mesh, alike, src_data_rank=None)
    indices: list[int] = found.to_local().flatten().tolist()
    return indices


def _neighbours(indices: list[int]) -> Iterator[_Run]:
    begin = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[place - 1] + 1:
            yield _Run(indices[begin], begin, place - begin)
            begin = place


def _cut(local: Tensor, box: tuple[_Run, ...]) -> Tensor:
    for dim, run in enumerate(box):
        if run.length != local.shape[dim]:
            local = local.narrow(dim, run.place, run.length)
    return local
