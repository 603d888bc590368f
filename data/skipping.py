"""Loaders read behind their first batches: by skipping indices where they have some, else by reading."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from ..distributed.group import index_and_count
from .samplers import SamplerAround, SkippingSampler, index_source, with_options
from .starting import begun_at


def batches_from(loader: Any, num_skipped: int) -> Iterator[Any]:
    """The batches of a pass behind its first `num_skipped` ones.

    What works by indices, or can begin anywhere by itself, loads nothing before; others are read and thrown away.
    """
    if num_skipped == 0:
        return iter(loader)
    if (own := getattr(loader, "iterate_from", None)) is not None:
        return own(num_skipped)  # type: ignore[no-any-return]
    if reads_by_index(loader):
        return iter(without_first(loader, num_skipped))
    iterator: Iterator[Any] = iter(loader)
    discard(iterator, num_skipped)
    return iterator


def opened_at(loader: Any, num_skipped: int, num_kept: int) -> tuple[list[Any], Iterator[Any]]:
    """The first batches of a pass, at most `num_kept` and `num_skipped`, and the pass behind `num_skipped` batches."""
    num_kept = min(num_kept, num_skipped)
    if num_skipped and reads_by_index(loader):
        name, source = index_source(loader)
        loader = with_options(loader, **{name: _GappedSampler(source, num_kept, num_skipped)})
        num_skipped = num_kept
    iterator = iter(loader)
    kept = list(islice(iterator, num_kept))
    discard(iterator, num_skipped - num_kept)
    return kept, iterator


def without_first(loader: DataLoader[Any], num_skipped: int) -> DataLoader[Any]:
    """A loader that reads by indices like this one, each pass of which begins `num_skipped` batches later."""
    name, source = index_source(loader)
    return with_options(loader, **{name: SkippingSampler(source, num_skipped)})


def reads_by_index(loader: Any) -> bool:
    """Whether it is a `DataLoader` whose dataset is read by indices."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def discard(iterator: Iterator[Any], count: int, what: str = "batches") -> int:
    """Read and throw away; on the main process's terminal a bar shows it if it takes longer than a second.

    Returns:
        How many there were.
    """
    if not count:
        return 0
    disabled = None if index_and_count()[0] == 0 else True  # None: where there is no terminal
    bar = tqdm(islice(iterator, count), f"skipping {what}", count, leave=False, delay=1, disable=disabled)
    return sum(1 for _ in bar)


class _GappedSampler(SamplerAround):
    """A sampler or batch sampler that gives its first items, and then goes on further behind.

    Args:
        sampler: what gives indices, or lists of them.
        num_first: how many are given before the gap.
        num_skipped: what its second part begins behind.
    """

    def __init__(self, sampler: Any, num_first: int, num_skipped: int) -> None:
        super().__init__(sampler, num_skipped - num_first)
        self.num_first = num_first

    def __iter__(self) -> Iterator[Any]:
        # Begun when it is read: torch makes two iterators where there are workers, and reads the second.
        for part in begun_at(self.sampler, self.num_first + self.num_skipped, self.num_first):
            yield from part
