"""A loader's own random stream: what its data draws is a function of (seed, epoch, batch), and of nothing else.

- What a map-style dataset and the collate function draw for a batch begins from (seed, epoch, number of the batch), in
  whichever process they are read. The number counts the batches of all processes: where whole batches are dealt,
  batch i of process r of w is number i * w + r, so that another number of processes gives the same batches the same
  numbers.
- What an iterable dataset draws begins anew with each batch as well, from (seed, epoch, worker, batch of this worker);
  the batches of other iterables, from (seed, epoch, batch).
- What a sampler draws is one stream for the whole pass, from (seed, epoch); how far ahead it is read changes nothing.

In the main process the training's random states are put back after each of these, also after an exception; where
nothing can draw, nothing is done. The states are those of Python, of NumPy if it was imported, and of torch on the CPU.
All threads share them, so that what another thread draws meanwhile comes from the data's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from .streams import Streams, put_streams, seed_all, streams_now

T = TypeVar("T")

_END = object()


def derived_seed(*parts: object) -> int:
    """A seed of 63 bits that only these parts decide."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class DataSeeds:
    """Where the random numbers of one loader's data come from. Local.

    Args:
        seed: the run's.
        process_index: so that the workers of no two processes draw the same numbers.
        ordinal: so that the data of no two loaders does.
        by_batch: everything is drawn by batch, and the training's random states are left alone, as this module says;
            else worker processes alone have seeds of their own: by (seed, epoch, process, loader).
    """

    def __init__(self, seed: int, process_index: int = 0, *, ordinal: int = 0, by_batch: bool = False) -> None:
        self.seed = seed
        self.process_index = process_index
        self.ordinal = ordinal
        self.by_batch = by_batch
        self.generator = torch.Generator()
        """What loaders draw the seeds of their worker processes from."""
        self.replaced: list[torch.Generator | None] = []
        """What these loaders drew them from before; None: from torch's own random state."""
        self.pass_seed = 0
        """That of the next pass, the same on all processes. A pass keeps the one that it began with."""
        self.shared_pass_seed: Tensor = torch.zeros((), dtype=torch.int64)
        """The same for copies in worker processes, which see it change if they are told to `share` it."""
        self.set_epoch(0)

    def share(self) -> None:
        """Let copies in worker processes that live on know of a new pass."""
        self.shared_pass_seed.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the seeds of the next pass."""
        self.generator.manual_seed(derived_seed(self.seed, epoch, self.process_index, self.ordinal))
        self.pass_seed = derived_seed(self.seed, epoch, "all", self.ordinal)
        self.shared_pass_seed.fill_(self.pass_seed)

    def keep_pace(self) -> None:
        """Draw at the start of a pass what those loaders drew there, so that samplers draw on as they would have.

        Where the data has its own stream, torch's random state is left alone.
        """
        for generator in self.replaced:
            if generator is not None or not self.by_batch:
                torch.empty((), dtype=torch.int64).random_(generator=generator)


def apart(make: Callable[[], Iterator[Any]], seed: int) -> Iterator[Any]:
    """The items of an iterator, each read apart from the training's random states.

    Args:
        make: begins the pass, whose draws then begin from `seed`. What is drawn later is seeded by what is read.
        seed: see `make`.
    """
    training = streams_now()
    try:
        seed_all(seed)
        iterator = make()
    finally:
        put_streams(training)
    return _apart(iterator, training)


def _apart(iterator: Iterator[Any], training: Streams) -> Iterator[Any]:
    while True:
        training = streams_now(training)
        try:
            item = next(iterator, _END)
        finally:
            put_streams(training)
        if item is _END:
            return
        yield item


class CarriedStream:
    """A random stream beside the training's, which goes on where it was left. Local.

    Args:
        seed: what it begins from.
    """

    def __init__(self, seed: int) -> None:
        self._training = streams_now()
        try:
            seed_all(seed)
            self._own = streams_now()
        finally:
            put_streams(self._training)

    def draw(self, function: Callable[[], T]) -> T:
        """What a function returns that draws from this stream; if it raises, the stream is left where it was."""
        self._training = streams_now(self._training)
        try:
            put_streams(self._own)
            result = function()
            self._own = streams_now(self._own)
        finally:
            put_streams(self._training)
        return result
