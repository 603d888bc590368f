"""Samplers that draw alike on all processes, although the random states of these differ."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..distributed.random import preserved_random_state
from .samplers import SamplerAround, SeedableRandomSampler, SkippingSampler, index_source, with_options

_END = object()
_DRAWING_BY_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class AlikeSampler(SamplerAround):
    """A sampler or batch sampler that draws from torch's random state, made to draw from a generator instead.

    Where all processes have that generator in one state before a pass, they draw alike. What the sampler draws by NumPy
    or Python before it gives its first item, such as a whole permutation, is alike as well.

    Args:
        sampler: what gives indices, or lists of them.
        generator: stands in for torch's random state.
    """

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        super().__init__(sampler)
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        with preserved_random_state(torch.device("cpu")), self._in_place_of_torchs():
            # Seeded once a pass: putting their states in place for each item would cost more than most samplers do.
            seed = int(torch.randint(2**32, ()))
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            iterator = iter(self.sampler)
            item = next(iterator, _END)
        while item is not _END:
            yield item
            with self._in_place_of_torchs():
                item = next(iterator, _END)

    @contextmanager
    def _in_place_of_torchs(self) -> Iterator[None]:
        own = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(own)


def drawing_alike(loader: DataLoader[Any], seed: int) -> tuple[DataLoader[Any], torch.Generator | None]:
    """The loader, and the generator that its sampler draws from, whose state processes have to share before each pass.

    Args:
        loader: its sampler's own generator is used, if it has one. One of torch's samplers without a generator gets
            one, whose seed is drawn from torch's random state; for others one is put in place of that state.
        seed: of the generator that is put there.
    Returns:
        The loader, and None where nothing is drawn.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader, None
    name, outermost = index_source(loader)
    sampler = outermost
    while type(sampler) in (BatchSampler, SkippingSampler):
        sampler = sampler.sampler
    if isinstance(sampler, (SequentialSampler, SeedableRandomSampler)):
        return loader, None
    if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
        return loader, own
    if type(sampler) in _DRAWING_BY_GENERATOR:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return with_options(loader, **{name: _with_generator(outermost, generator)}), generator
    generator = torch.Generator().manual_seed(seed)
    return with_options(loader, **{name: AlikeSampler(outermost, generator)}), generator


def _with_generator(sampler: Any, generator: torch.Generator) -> Any:
    """A copy of a sampler, or of what stands around one, that draws from the generator."""
    clone = copy.copy(sampler)
    if type(sampler) in _DRAWING_BY_GENERATOR:
        clone.generator = generator
    else:
        clone.sampler = _with_generator(sampler.sampler, generator)
    return clone
