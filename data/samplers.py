"""Samplers whose order is a function of (seed, epoch), and samplers that begin later."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """Shuffles by (seed, epoch) alone: the same epoch has the same order, whatever was drawn before.

    Args:
        data_source: what is sampled from.
        seed: the order of epoch e is that of a generator with the seed `seed + e`.
        replacement: draw with replacement.
        num_samples: samples per epoch; by default as many as there are.
    """

    def __init__(
        self, data_source: Any, seed: int, *, replacement: bool = False, num_samples: int | None = None
    ) -> None:
        super().__init__(data_source, replacement, num_samples, torch.Generator())
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        assert generator is not None
        generator.manual_seed((self.seed + self.epoch) % 2**64)
        yield from super().__iter__()


class SkippingSampler:
    """A sampler or batch sampler without its first items. Nothing is loaded for them.

    Args:
        sampler: what gives indices, or lists of them.
        num_skipped: how many of its items are left out in each pass.
    """

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.sampler = sampler
        self.num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.num_skipped, None)

    def __len__(self) -> int:
        return max(len(self.sampler) - self.num_skipped, 0)


def with_samplers(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """A copy of a loader with another `sampler` or `batch_sampler`; the loader itself is not changed."""
    clone = copy.copy(loader)
    for name, sampler in samplers.items():
        object.__setattr__(clone, name, sampler)  # DataLoader guards these against changes of a loader in use
    object.__setattr__(clone, "_iterator", None)  # persistent workers belong to the loader that started them
    return clone


def with_seedable_sampler(loader: Any, data_seed: int | None = None) -> Any:
    """The loader, shuffling by (seed, epoch) alone if it shuffles by torch's `RandomSampler`; others as they are.

    Args:
        loader: any iterable of batches.
        data_seed: the seed; by default that of the sampler's own generator, else torch's initial seed.
    """
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not RandomSampler:
        return loader
    seedable = _seedable(loader.sampler, data_seed)
    if loader.batch_sampler is None:
        return with_samplers(loader, sampler=seedable)
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_sampler.sampler is not loader.sampler:
        return loader  # someone else's way to make batches
    batch_sampler = copy.copy(loader.batch_sampler)
    batch_sampler.sampler = seedable
    return with_samplers(loader, sampler=seedable, batch_sampler=batch_sampler)


def _seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    if data_seed is None:
        generator = sampler.generator
        data_seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return SeedableRandomSampler(
        sampler.data_source, data_seed, replacement=sampler.replacement, num_samples=sampler._num_samples
    )


def epoch_listeners(loader: Iterable[Any]) -> list[Any]:
    """The loader, its samplers at any depth, and its dataset: those that have a `set_epoch`."""
    found: list[Any] = []
    waiting: list[Any] = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    return [part for part in found if callable(getattr(part, "set_epoch", None))]
