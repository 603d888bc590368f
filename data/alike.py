"""Samplers that draw alike on all processes, although the random states of these differ."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ..distributed.random import preserved_random_state
from .samplers import SamplerAround, SeedableRandomSampler, SkippingSampler, with_samplers

_END = object()


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
        loader: its sampler's own generator is used, if it has one; else one is put in place of torch's random state.
        seed: of that generator.
    Returns:
        The loader, and None where nothing is drawn.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    outermost = sampler = getattr(loader, name)
    while type(sampler) in (BatchSampler, SkippingSampler):
        sampler = sampler.sampler
    if isinstance(sampler, (SequentialSampler, SeedableRandomSampler)):
        return loader, None
    if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
        return loader, own
    generator = torch.Generator().manual_seed(seed)
    return with_samplers(loader, **{name: AlikeSampler(outermost, generator)}), generator
