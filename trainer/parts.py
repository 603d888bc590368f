"""Batches cut into parts of fewer samples, and what the parts gave put together again. All is local."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..data.sizes import find_batch_size
from ..distributed.errors import DataError
from ..distributed.nested import is_namedtuple, map_leaves, named_leaves, recursively_apply


class Part(NamedTuple):
    """Some samples of a batch."""

    batch: Any
    samples: int | None
    """How many they are; None: all."""
    share: float
    """How many of the batch's they are."""


def whole(batch: Any) -> list[Part]:
    """A batch as the one part of itself."""
    return [Part(batch, None, 1.0)]


def count_rows(batch: Any, count_samples: Callable[[Any], int | None]) -> int:
    """The samples of a batch that can be cut: the common first dimension of what it holds.

    Raises:
        DataError: it has none, or the task counts other samples than these.
    """
    rows, counted = find_batch_size(batch), count_samples(batch)
    if rows is None:
        raise DataError("nothing in the batch has a first dimension, along which it could be cut.")
    if counted != rows:
        raise DataError(f"Task.count_samples tells {counted} samples, and the tensors' first dimension is {rows}.")
    return rows


def cut(batch: Any, rows: int, most: int) -> list[Part]:
    """A batch in parts that are as large as each other, but for one sample, in its order.

    Tensors and arrays are cut in their first dimension, lists and tuples where they have an entry for each sample.
    Numbers and texts are in each part as they are.

    Args:
        batch: nested data.
        rows: its samples.
        most: how many samples a part may have.
    Raises:
        DataError: it holds what can't be cut; says where.
    """
    count = -(-rows // most)
    parts, begin = [], 0
    for index in range(count):
        samples = rows // count + (index < rows % count)
        place = slice(begin, begin + samples)
        parts.append(Part(_cut(batch, place, rows), samples, samples / rows))
        begin += samples
    return parts


def _cut(batch: Any, place: slice, rows: int) -> Any:
    def change(name: str, leaf: Any) -> Any:
        if isinstance(leaf, (str, bytes, numbers.Number, NoneType)):
            return leaf
        if isinstance(leaf, (list, tuple)) and not isinstance(leaf, PackedSequence):
            return leaf[place]
        if not _has_shape(leaf):
            kind = type(leaf).__name__
            raise DataError(f"{name} is a {kind}, and it can't be told which of it belongs to which sample.")
        return _rows_of(leaf, place)

    return map_leaves(batch, change, "batch", lambda data: isinstance(data, PackedSequence) or _is_column(data, rows))


def _rows_of(leaf: Any, place: slice) -> Any:
    if not len(leaf.shape):
        return leaf
    rest = leaf[place]
    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
        rest = rest.detach().requires_grad_()  # a leaf as the whole is: the step may want its gradient
    return rest


def _is_column(data: Any, rows: int) -> bool:
    """Whether this has an entry for each sample: a list of anything but tensors, or a tuple of one kind of it."""
    if not isinstance(data, (list, tuple)) or len(data) != rows or is_namedtuple(data):
        return False
    if isinstance(data, tuple) and len({type(entry) for entry in data}) > 1:
        return False
    return not any(_has_shape(leaf) for _, leaf in named_leaves(data))


def _has_shape(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested
    return hasattr(leaf, "shape") and hasattr(leaf, "__getitem__")


def extent_of(data: Any) -> tuple[Hashable, tuple[int, ...]] | None:
    """What the memory of a pass depends on: of which kind the leaves are, and how large; None where that can't be told.

    Where a batch of a kind has fitted, one of which no size is larger does so as well.
    """
    kinds: list[Hashable] = []
    sizes: list[int] = []
    for name, leaf in named_leaves(data):
        if _has_shape(leaf):
            kinds.append((name, str(getattr(leaf, "dtype", "")), len(leaf.shape)))
            sizes.extend(leaf.shape)
        elif isinstance(leaf, (str, bytes)):
            kinds.append((name, "text"))
            sizes.append(len(leaf))
        elif isinstance(leaf, Sequence) and not isinstance(leaf, PackedSequence):  # of texts
            kinds.append((name, "texts"))
            sizes += [len(leaf), max(map(len, leaf), default=0)]
        elif not isinstance(leaf, (numbers.Number, NoneType)):
            return None
    return tuple(kinds), tuple(sizes)


def without_graph(outputs: Any) -> Any:
    """What a step returned, of which nothing holds its graph."""
    return recursively_apply(Tensor.detach, outputs)


def joined(outputs: Sequence[Any], parts: Sequence[Part]) -> Any:
    """What a step would have returned for the whole batch, from what it returned for its parts.

    Mean losses become their mean over samples, pairs `(loss_sum, count)` their sum. Of the rest of a mapping tensors
    with a row for each sample are joined, numbers become their mean over samples, and of others there is a list.
    """
    found = [(each, part) for each, part in zip(outputs, parts, strict=True) if each is not None]
    if not found:
        return None
    kept, of_parts = [each for each, _ in found], [part for _, part in found]
    if not isinstance(kept[0], Mapping):
        return _joined_losses(kept, of_parts)
    names = [name for name in kept[0] if all(name in each for each in kept)]
    columns = {name: [each[name] for each in kept] for name in names}
    joins = {name: _joined_losses if name == "loss" else _joined_values for name in names}
    return {name: joins[name](columns[name], of_parts) for name in names}


def _joined_losses(losses: Sequence[Any], parts: Sequence[Part]) -> Any:
    pairs = [(loss, part) for loss, part in zip(losses, parts, strict=True) if loss is not None]
    if not pairs:
        return None
    if isinstance(pairs[0][0], tuple):
        return tuple(sum(column) for column in zip(*(loss for loss, _ in pairs), strict=True))
    return sum(loss * part.share for loss, part in pairs)


def _joined_values(values: Sequence[Any], parts: Sequence[Part]) -> Any:
    pairs = list(zip(values, parts, strict=True))
    if all(isinstance(value, Tensor) and value.shape[:1] == (part.samples,) for value, part in pairs):
        is_even = len({value.shape[1:] for value in values}) == 1  # else a step has cut each part to its longest sample
        return torch.cat(list(values)) if is_even else list(values)
    if all(isinstance(value, float) or (isinstance(value, Tensor) and not value.ndim) for value in values):
        return sum(value * part.share for value, part in pairs)
    return list(values)
