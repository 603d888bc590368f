"""`BatchSamplerShard` and `IterableDatasetShard`: one process's share of the indices, or of the samples, of a pass.

Rounds are dealt by whole batches, so that the batches of the processes, read round by round, are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ..distributed.errors import check_integer
from .around import within
from .rounds import Dealer, check_split, completed, is_in_full_rounds, num_dealt, rounds_of
from .sizes import loader_length
from .starting import begins_anywhere, begun_at, items_from


class BatchSamplerShard(Dealer, BatchSampler):
    """The batches of indices that one process gets of a batch sampler. Local.

    Args:
        batch_sampler: what is shared; every process has one that gives the same batches. Where it has no `batch_size`,
            its batches may have any sizes, and are dealt whole.
        num_processes: how many processes share it.
        process_index: the index of this one.
        split_batches: each batch is cut into as many parts as there are processes; else each is one process's.
        even_batches: complete the last round from the beginning of the pass, so that each process gets as many
            batches as the others, each of full size.
    Raises:
        ConfigError: batches that can't be split evenly.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(
            num_processes,
            process_index,
            split_batches=split_batches,
            even_batches=even_batches,
            drop_last=bool(getattr(batch_sampler, "drop_last", False)),
        )
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        if split_batches:
            check_split(self.batch_size, num_processes, getattr(batch_sampler, "kind", type(batch_sampler).__name__))

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        if self.even_batches or self.drop_last:
            return True
        if self.split_batches:
            samples, size = sample_count(self.batch_sampler), self.batch_size
            assert size is not None
            return samples is not None and _reaches_all(samples % size, self.num_processes, size // self.num_processes)
        return is_in_full_rounds(self.batch_sampler, self.num_processes)

    def __len__(self) -> int:
        """Batches that this process gets. Raises TypeError where the number can't be known before the pass."""
        total = len(self.batch_sampler)
        if self.split_batches:
            return total - self._lacks_last_part()
        completes = bool(self.even_batches)
        return num_dealt(
            total, self.num_processes, self.process_index, drop_last=self.drop_last, even_batches=completes
        )

    def round_sizes(self) -> list[int] | None:
        """Samples of all processes in each round: known where all are full, of batches of a fixed size."""
        is_known = (self.even_batches or self.drop_last) and type(self.batch_sampler) is BatchSampler
        if not is_known or self.batch_size is None:
            return None
        return [self.batch_size * (1 if self.split_batches else self.num_processes)] * len(self)

    @property
    def begins_anywhere(self) -> bool:
        """See `starting.begins_anywhere`."""
        return begins_anywhere(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[list[int]]:
        """This process's batches behind its first `num_skipped` ones; the last round is that of the whole pass."""
        self.real_samples = -1
        return chain.from_iterable(self._opened(num_skipped))

    def _opened(self, num_skipped: int) -> Iterator[Iterator[list[int]]]:
        """The pass, begun when it is read: torch makes two iterators where there are workers, and reads the second."""
        per_round = 1 if self.split_batches else self.num_processes
        first, batches = begun_at(self.batch_sampler, num_skipped * per_round, per_round)
        yield self._parts(batches, first) if self.split_batches else self._dealt(batches, first)

    def _dealt(self, batches: Iterator[Any], first: list[Any]) -> Iterator[list[int]]:
        """Whole batches in turn. The last round is completed by samples, or by batches where these have any sizes."""
        waiting: list[Any] = []
        for batch in batches:
            if len(waiting) == self.num_processes:  # its last batch is short, and yet it was not the end
                yield waiting[self.process_index]
                waiting = []
            waiting.append(batch)
            if len(waiting) == self.num_processes and (self.batch_size is None or len(batch) == self.batch_size):
                first = first or waiting
                yield waiting[self.process_index]
                waiting = []
        if self.drop_last:
            return
        self.real_samples = sum(len(batch) if hasattr(batch, "__len__") else 1 for batch in waiting)
        if self.even_batches and waiting:
            waiting = self._completed(waiting, first or waiting)
        yield from waiting[self.process_index : self.process_index + 1]

    def _completed(self, batches: list[Any], first: list[Any]) -> list[Any]:
        """A last round with a batch for each process, filled up from the first round, again and again."""
        if self.batch_size is None:
            return completed(batches, first, self.num_processes)
        samples = chain(chain.from_iterable(batches), cycle(chain.from_iterable(first)))
        return [list(islice(samples, self.batch_size)) for _ in range(self.num_processes)]

    def _parts(self, batches: Iterator[Any], firsts: list[Any]) -> Iterator[list[int]]:
        """This process's part of each batch."""
        assert self.batch_size is not None
        size = self.batch_size // self.num_processes
        start = size * self.process_index
        first: list[Any] = firsts[0] if firsts else []
        self.real_samples = -1 if self.drop_last else 0
        for batch in batches:
            first = first or batch
            if len(batch) < self.batch_size:
                if self.drop_last:
                    continue
                self.real_samples = len(batch)
                if self.even_batches:
                    batch = completed(batch, first, self.batch_size)
            else:
                self.real_samples = min(self.real_samples, 0)
            if part := batch[start : start + size]:
                yield part

    def _lacks_last_part(self) -> bool:
        """Whether the short last batch has nothing left for this process. Raises TypeError if that can't be known."""
        if self.drop_last or self.even_batches:
            return False
        samples = sample_count(self.batch_sampler)
        if samples is None:
            raise TypeError("the last batch of a batch sampler whose sampler has no length may have any size")
        assert self.batch_size is not None
        rest = samples % self.batch_size
        return 0 < rest <= self.process_index * (self.batch_size // self.num_processes)


class IterableDatasetShard(Dealer, IterableDataset[Any]):
    """The samples that one process gets of an iterable dataset, of which every process reads the whole. Local.

    Args:
        dataset: what is shared; every process has one that gives the same samples in the same order.
        batch_size: samples per batch: of one process, or with `split_batches` of all together.
        drop_last: leave out the last round if it is not full.
        num_processes: how many processes share it.
        process_index: the index of this one.
        split_batches: `batch_size` is that of all processes together.
        even_batches: complete the last round from the first one, so that each process gets as many samples.
    Raises:
        ConfigError: batches that can't be split evenly.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
    ) -> None:
        super().__init__(
            num_processes, process_index, split_batches=split_batches, even_batches=even_batches, drop_last=drop_last
        )
        check_integer("IterableDatasetShard(batch_size)", batch_size, 1)
        if split_batches:
            check_split(batch_size, num_processes, type(dataset).__name__)
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self.num_skipped = 0
        """Samples of the dataset that each pass leaves out, as it goes on in the middle of one."""
        self.real_samples = 0  # here it is that of the sample that was given last

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        if self.even_batches or self.drop_last:
            return True
        samples = loader_length(self.dataset)
        share, block = self._sizes()
        return samples is not None and _reaches_all(samples % block, self.num_processes, share)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch begins, where it listens; else its generator is seeded with it."""
        self.epoch = epoch
        if callable(own := getattr(within(self.dataset), "set_epoch", None)):
            own(epoch)

    def __len__(self) -> int:
        """Samples that this process gets. Raises TypeError where the dataset has no length."""
        share, block = self._sizes()
        rounds, rest = divmod(len(self.dataset), block)
        if self.drop_last:
            return rounds * share
        if self.even_batches:
            return (rounds + (rest > 0)) * share
        return rounds * share + min(max(rest - share * self.process_index, 0), share)

    def __iter__(self) -> Iterator[Any]:
        dataset = within(self.dataset)
        generator = getattr(dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share, block = self._sizes()
        mine = slice(share * self.process_index, share * (self.process_index + 1))
        self.real_samples = 0
        first: list[Any] = []
        for samples in rounds_of(islice(self.dataset, self.num_skipped, None), block):
            if len(samples) == block:
                first = first or samples
            elif self.drop_last:
                return
            else:
                self.real_samples = len(samples)
                if self.even_batches:
                    samples = completed(samples, first or samples, block)
            yield from samples[mine]

    def _sizes(self) -> tuple[int, int]:
        """Samples per round of this process, and of all."""
        if self.split_batches:
            return self.batch_size // self.num_processes, self.batch_size
        return self.batch_size, self.batch_size * self.num_processes


class DealtSampler(Dealer):
    """Every so-many-th item of a sampler or batch sampler: none twice, none left out. Local.

    Args:
        sampler: what gives indices, or lists of them; the same on every process.
        num_processes: how many processes share it.
        process_index: the index of this one.
    """

    def __init__(self, sampler: Any, num_processes: int, process_index: int) -> None:
        super().__init__(num_processes, process_index)
        self.sampler = sampler
        self.batch_size: int | None = getattr(sampler, "batch_size", None)

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many items as the others."""
        return is_in_full_rounds(self.sampler, self.num_processes)

    @property
    def begins_anywhere(self) -> bool:
        """See `starting.begins_anywhere`."""
        return begins_anywhere(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """This process's items behind its first `num_skipped` ones."""
        items = items_from(self.sampler, num_skipped * self.num_processes)
        return islice(items, self.process_index, None, self.num_processes)

    def __len__(self) -> int:
        return num_dealt(len(self.sampler), self.num_processes, self.process_index)


class NativeShard(Dealer):
    """Says of what was shared elsewhere, as a dataset that shards itself, that its shards may differ in length."""

    @property
    def is_even(self) -> bool:
        """Nobody knows."""
        return False


def _reaches_all(rest: int, num_processes: int, share: int) -> bool:
    """Whether the samples of a last round are enough for each process to get some, or none does."""
    return rest == 0 or rest > share * (num_processes - 1)


def sample_count(batch_sampler: Any) -> int | None:
    """Samples in a pass of a batch sampler, None where it is not known."""
    sampler = getattr(batch_sampler, "sampler", None)
    if sampler is None:
        return None
    skipped = getattr(batch_sampler, "num_skipped", None)
    if skipped is None:
        return loader_length(sampler)
    inner, size = sample_count(sampler), getattr(batch_sampler, "batch_size", None)
    return None if inner is None or size is None else max(inner - skipped * size, 0)


def undealt(sampler: Any) -> Any:
    """The sampler or batch sampler that is dealt out to processes; itself where it is not."""
    while isinstance(sampler, (BatchSamplerShard, DealtSampler)):
        sampler = sampler.batch_sampler if isinstance(sampler, BatchSamplerShard) else sampler.sampler
    return sampler
