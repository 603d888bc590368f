"""Samplers whose order is a function of (seed, epoch), and samplers that begin later."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from .epochs import TELLERS
from .starting import begins_anywhere, is_plain, items_from

_INDICES_AT_ONCE = 2**16


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

    begins_anywhere = True
    """A pass can be read from any index, as often as one likes; see `starting.begins_anywhere`."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[int]:
        """The indices of the pass behind its first `num_skipped` ones."""
        # One for each pass, so that passes at the same time draw alike.
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**64)
        if not self.replacement:
            return chain.from_iterable(self._pieces(generator, num_skipped))  # no generator runs for each index
        this_pass = copy.copy(self)
        this_pass.generator = generator
        return islice(RandomSampler.__iter__(this_pass), num_skipped, None)

    def _pieces(self, generator: torch.Generator, num_skipped: int) -> Iterator[list[int]]:
        """Permutations one after another, as `RandomSampler` gives them, made to numbers piece by piece."""
        size, left = len(self.data_source), self.num_samples
        while left > 0 and size:
            count = min(size, left)
            left -= count
            order = torch.randperm(size, generator=generator)
            for start in range(min(num_skipped, count), count, _INDICES_AT_ONCE):
                yield order[start : min(start + _INDICES_AT_ONCE, count)].tolist()
            num_skipped = max(num_skipped - count, 0)


class SamplerAround:
    """The base of what stands around a sampler or batch sampler and gives its items.

    Args:
        sampler: what gives indices, or lists of them.
        num_skipped: how many of its items are left out at the beginning of each pass.
    """

    def __init__(self, sampler: Any, num_skipped: int = 0) -> None:
        self.sampler = sampler
        self.num_skipped = num_skipped
        self.batch_size: int | None = getattr(sampler, "batch_size", None)
        self.drop_last = bool(getattr(sampler, "drop_last", False))

    @property
    def kind(self) -> str:
        """The class of the user's sampler, for messages."""
        return getattr(self.sampler, "kind", None) or type(self.sampler).__name__

    def __len__(self) -> int:
        """Items in a pass. Raises TypeError where the sampler has no length."""
        return max(len(self.sampler) - self.num_skipped, 0)


class SkippingSampler(SamplerAround):
    """A sampler or batch sampler without its first `num_skipped` items. Nothing is loaded for them."""

    @property
    def begins_anywhere(self) -> bool:
        """See `starting.begins_anywhere`."""
        return begins_anywhere(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """The items behind its own first `num_skipped` ones."""
        return items_from(self.sampler, self.num_skipped + num_skipped)


def is_skipping(loader: Any) -> bool:
    """Whether a loader goes on in the middle of a pass, as `skip_first_batches` makes it."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return any(isinstance(sampler, SkippingSampler) for sampler in samplers)


def index_source(loader: DataLoader[Any]) -> tuple[str, Any]:
    """The option by which a loader gets its indices, and what it is: a batch sampler, or without batches a sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return name, getattr(loader, name)


def with_options(loader: DataLoader[Any], **options: Any) -> DataLoader[Any]:
    """A copy of a loader with another `sampler`, `batch_sampler`, `dataset` and so on; the loader is not changed."""
    clone = copy.copy(loader)
    for name, option in options.items():
        object.__setattr__(clone, name, option)  # DataLoader guards these against changes of a loader in use
    object.__setattr__(clone, "_iterator", None)  # persistent workers belong to the loader that started them
    return clone


def with_seedable_sampler(loader: Any, data_seed: int | None = None) -> Any:
    """The loader, shuffling by (seed, epoch) alone if it shuffles by torch's `RandomSampler`; others as they are.

    Args:
        loader: any iterable of batches.
        data_seed: the seed; by default that of the sampler's own generator, else torch's initial seed.
    """
    if not shuffles(loader):
        return loader
    seedable = _seedable(loader.sampler, data_seed)
    if loader.batch_sampler is None:
        return with_options(loader, sampler=seedable)
    batches = loader.batch_sampler
    return with_options(
        loader, sampler=seedable, batch_sampler=BatchSampler(seedable, batches.batch_size, batches.drop_last)
    )


def shuffles(loader: Any) -> bool:
    """Whether a loader shuffles by a `RandomSampler`, torch's or that of torchdata, in no other way of its own."""
    if not isinstance(loader, DataLoader) or not is_plain(loader.sampler, "RandomSampler"):
        return False
    batches: Any = loader.batch_sampler
    return batches is None or (is_plain(batches, "BatchSampler") and batches.sampler is loader.sampler)


def seed_of(sampler: Any) -> int:
    """The seed of the sampler's own generator, else torch's initial seed."""
    generator = getattr(sampler, "generator", None)
    return torch.initial_seed() if generator is None else generator.initial_seed()


def _seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    data_seed = seed_of(sampler) if data_seed is None else data_seed
    return SeedableRandomSampler(
        sampler.data_source, data_seed, replacement=sampler.replacement, num_samples=sampler._num_samples
    )


def epoch_listeners(loader: Iterable[Any]) -> list[Any]:
    """The loader, its samplers at any depth, and its dataset: those that have a `set_epoch`."""
    return [part for part in parts_of_loader(loader) if callable(getattr(part, "set_epoch", None))]


def parts_of_loader(loader: Any) -> list[Any]:
    """The loader, and what it reads from at any depth: other loaders, samplers, its dataset. Each is there once.

    What tells its own parts the epoch is not looked into: datasets here, and a `CombinedLoader`.
    """
    found: list[Any] = []
    waiting: list[Any] = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        if not isinstance(part, TELLERS):
            waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset", "loader")]
    return found
