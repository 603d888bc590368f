"""Batches that say how many of their round's samples are real, also from worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from .seeding import derived_seed
from .shards import IterableDatasetShard
from .streams import seed_all


class Counted:
    """A batch with the number of real samples in its round; see `IterableDatasetShard.real_samples`."""

    __slots__ = ("batch", "real_samples")

    def __init__(self, batch: Any, real_samples: int) -> None:
        self.batch = batch
        self.real_samples = real_samples

    def pin_memory(self, device: Any = None) -> Counted:
        """The same in pinned memory; torch's loader calls it."""
        return Counted(pin_memory(self.batch, device), self.real_samples)  # type: ignore[no-untyped-call]


class CountingCollate:
    """A collate function whose batches say how many samples of their round are real.

    Args:
        collate_fn: the loader's own.
        shard: the loader's dataset; in a worker process, the worker's copy of it.
        draws_apart: the processes, which read the samples alike, draw other numbers from here on.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], shard: IterableDatasetShard, *, draws_apart: bool = False
    ) -> None:
        self.collate_fn = collate_fn
        self.shard = shard
        self.draws_apart = draws_apart

    def __call__(self, samples: Any) -> Counted:
        if self.draws_apart:
            seed_all(derived_seed(self.shard.process_index, int(torch.randint(2**62, ()))))
        return Counted(self.collate_fn(samples), self.shard.real_samples)
