"""Samplers read from an item in the middle of their pass, without giving those before it where they can."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from .rounds import rounds_of

_TORCHDATA_SAMPLERS = "torchdata.stateful_dataloader.sampler"


def is_plain(sampler: Any, name: str) -> bool:
    """Whether it is of this class of torch's and none of its subclasses. torchdata's has the attributes of torch's."""
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__ in (RandomSampler.__module__, _TORCHDATA_SAMPLERS)


def begins_anywhere(sampler: Any) -> bool:
    """Whether a sampler can be read from any item, as often as one likes, and gives the same each time."""
    if is_plain(sampler, "BatchSampler"):
        return begins_anywhere(sampler.sampler)
    return type(sampler) in (SequentialSampler, range, list, tuple) or bool(getattr(sampler, "begins_anywhere", False))


def items_from(sampler: Any, num_skipped: int) -> Iterator[Any]:
    """The items of a pass of a sampler or batch sampler behind its first `num_skipped` ones. Nothing is loaded."""
    if num_skipped == 0:
        return iter(sampler)
    if (own := getattr(sampler, "iterate_from", None)) is not None:
        return own(num_skipped)  # type: ignore[no-any-return]
    if begins_anywhere(sampler):
        if is_plain(sampler, "BatchSampler"):
            return _batches_from(sampler, num_skipped)
        if type(sampler) is SequentialSampler:
            return iter(range(num_skipped, len(sampler)))
    return islice(iter(sampler), num_skipped, None)


def begun_at(sampler: Any, num_skipped: int, num_kept: int) -> tuple[list[Any], Iterator[Any]]:
    """The first items of a pass, at most `num_kept` and `num_skipped`, and the pass behind its first `num_skipped`."""
    num_kept = min(num_kept, num_skipped)
    if begins_anywhere(sampler):
        return list(islice(iter(sampler), num_kept)), items_from(sampler, num_skipped)
    iterator = iter(sampler)  # one pass: another might draw another order
    return list(islice(iterator, num_kept)), islice(iterator, num_skipped - num_kept, None)


def _batches_from(batches: BatchSampler, num_skipped: int) -> Iterator[list[Any]]:
    size = batches.batch_size
    for indices in rounds_of(items_from(batches.sampler, num_skipped * size), size):
        if len(indices) == size or not batches.drop_last:
            yield indices
