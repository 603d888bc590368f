"""Boxes of a tensor's elements: what two have in common, and whether some make up the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in the tensor, and its shape."""


def index_of(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """A box as an index of the whole tensor. Local."""
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


class Overlap(NamedTuple):
    """What two boxes of one tensor have in common, as an index of each."""

    first: tuple[slice, ...]
    second: tuple[slice, ...]


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> Overlap | None:
    """What two boxes have in common, None where that is nothing. Local."""
    first, second = [], []
    for begin, size, at, length in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(begin, at), min(begin + size, at + length)
        if low >= high:
            return None
        first.append(slice(low - begin, high - begin))
        second.append(slice(low - at, high - at))
    return Overlap(tuple(first), tuple(second))


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """A range of a tensor's elements, in row-major order, as boxes: at most 2 * (dimensions) - 1 of them. Local.

    Args:
        shape: of the tensor.
        begin: the first element.
        end: the one behind the last.
    Returns:
        The boxes in the order of their elements; none for an empty range.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # a part of one row
        return _in_row(shape, last, begin - last * row, end - last * row)
    boxes = _in_row(shape, first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + (_in_row(shape, last, 0, end - last * row) if last * row < end else [])


def _in_row(shape: Sequence[int], index: int, begin: int, end: int) -> list[Box]:
    inner = boxes_of_range(shape[1:], begin, end)
    return [((index, *offset), (1, *sizes)) for offset, sizes in inner]


def read_shape(sizes: Any, dtype: torch.dtype) -> torch.Size:
    """A shape that a file tells of. Local; takes no memory.

    Raises:
        ValueError: no tensor has it: it is no list of integers, one is negative, or they are too large.
    """
    try:
        shape = torch.Size(sizes)
        torch.empty(shape, dtype=dtype, device="meta")  # a product above 64 bits would else be a small number
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{sizes} is the shape of no tensor") from error
    return shape


def check_boxes(shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Refuse boxes that don't make up a tensor: each element has to be in exactly one. Local.

    Args:
        shape: of the tensor.
        boxes: those without elements don't count.
    Raises:
        ValueError: says what is wrong.
    """
    full = [box for box in boxes if prod(box[1])]
    for offset, sizes in full:
        if len(offset) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"the part {list(sizes)} at {list(offset)} has other dimensions than {list(shape)}")
        places = zip(offset, sizes, shape, strict=True)
        if any(begin < 0 or size < 0 or begin + size > end for begin, size, end in places):
            raise ValueError(f"the part {list(sizes)} at {list(offset)} lies outside of the shape {list(shape)}")
    found, wanted = sum(prod(sizes) for _, sizes in full), prod(shape)
    if found != wanted:
        raise ValueError(f"the parts have {found} elements, and the shape {list(shape)} has {wanted}")
    _check_apart(full, len(shape))


def _check_apart(boxes: list[Box], num_dims: int) -> None:
    """Refuse two that have something in common: from left to right, each is compared with those that reach it."""
    if len(boxes) < 2:
        return
    dim = max(range(num_dims), key=lambda each: len({offset[each] for offset, _ in boxes}))
    reaching: list[Box] = []
    for offset, sizes in sorted(boxes, key=lambda box: box[0][dim]):
        reaching = [other for other in reaching if other[0][dim] + other[1][dim] > offset[dim]]
        for at, lengths in reaching:
            if overlap(offset, sizes, at, lengths) is not None:
                raise ValueError(f"the parts {list(lengths)} at {list(at)} and {list(sizes)} at {list(offset)} overlap")
        reaching.append((offset, sizes))
