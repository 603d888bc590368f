"""`BatchSamplerShard` and `IterableDatasetShard`: one process's share of the indices, or of the samples, of a pass.

A pass is cut into rounds, in each of which every process gets one batch. They are dealt by whole batches, so that the
batches of the processes, read round by round, are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ..distributed.errors import ConfigError, check_integer
from .sizes import loader_length


class BatchSamplerShard(BatchSampler):
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
        check_place(type(self).__name__, num_processes, process_index)
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.real_samples = -1
        """Samples in the last round that was dealt, over all processes and without those that complete it; 0 where it
        was full; -1 while no pass has ended or if it was left out.
        """
        if split_batches:
            check_split(self.batch_size, num_processes, type(batch_sampler).__name__)

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        if self.even_batches or self.drop_last:
            return True
        if self.split_batches:
            samples, size = sample_count(self.batch_sampler), self.batch_size
            assert size is not None
            return samples is not None and _reaches_all(samples % size, self.num_processes, size // self.num_processes)
        total = loader_length(self.batch_sampler)
        return total is not None and total % self.num_processes == 0

    def __len__(self) -> int:
        """Batches that this process gets. Raises TypeError where the number can't be known before the pass."""
        total = len(self.batch_sampler)
        if self.split_batches:
            return total - self._lacks_last_part()
        if self.drop_last:
            return total // self.num_processes
        if self.even_batches:
            return -(-total // self.num_processes)
        return batches_of_process(total, self.num_processes, self.process_index)

    def __iter__(self) -> Iterator[list[int]]:
        self.real_samples = -1
        if self.split_batches:
            return self._parts()
        return self._dealt() if self.batch_size is not None else self._dealt_whole()

    def _dealt(self) -> Iterator[list[int]]:
        """Whole batches of one size; the last round is completed sample by sample."""
        first: list[Any] = []
        waiting: list[Any] = []
        for batch in self.batch_sampler:
            if len(waiting) == self.num_processes:  # its last batch is short, and yet it was not the end
                yield waiting[self.process_index]
                waiting = []
            waiting.append(batch)
            if len(waiting) == self.num_processes and len(batch) == self.batch_size:
                first = first or waiting
                yield waiting[self.process_index]
                waiting = []
        yield from self._completed(waiting, first)

    def _completed(self, waiting: list[Any], first: list[Any]) -> Iterator[list[int]]:
        """This process's batch of the last round, if that was not full."""
        if self.drop_last:
            return
        self.real_samples = sum(map(len, waiting))
        if not self.even_batches:
            yield from islice(waiting, self.process_index, self.process_index + 1)
        elif waiting:
            assert self.batch_size is not None
            yield filled(waiting, first or waiting, self.batch_size, self.process_index)

    def _dealt_whole(self) -> Iterator[Any]:
        """Batches of any sizes; the last round is completed by whole batches."""
        first: list[Any] = []
        waiting: list[Any] = []
        for batch in self.batch_sampler:
            waiting.append(batch)
            if len(waiting) == self.num_processes:
                first = first or waiting
                yield waiting[self.process_index]
                waiting = []
        if self.drop_last:
            return
        self.real_samples = sum(len(batch) if hasattr(batch, "__len__") else 1 for batch in waiting)
        if self.even_batches and waiting:
            waiting = list(islice(chain(waiting, cycle(first or waiting)), self.num_processes))
        yield from islice(waiting, self.process_index, self.process_index + 1)

    def _parts(self) -> Iterator[list[int]]:
        """This process's part of each batch."""
        assert self.batch_size is not None
        size = self.batch_size // self.num_processes
        start = size * self.process_index
        first: list[Any] = []
        self.real_samples = -1 if self.drop_last else 0
        for batch in self.batch_sampler:
            first = first or [batch]
            if len(batch) < self.batch_size:
                if self.drop_last:
                    continue
                self.real_samples = len(batch)
                if self.even_batches:
                    batch = list(islice(chain(batch, cycle(first[0])), self.batch_size))
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


class IterableDatasetShard(IterableDataset[Any]):
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
        check_place(type(self).__name__, num_processes, process_index)
        check_integer("IterableDatasetShard(batch_size)", batch_size, 1)
        if split_batches:
            check_split(batch_size, num_processes, type(dataset).__name__)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0
        self.real_samples = 0
        """Samples in the round of the sample that was given last, over all processes and without those that complete
        it; 0 where it was full.
        """

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
        if callable(own := getattr(self.dataset, "set_epoch", None)):
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
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share, block = self._sizes()
        mine = slice(share * self.process_index, share * (self.process_index + 1))
        self.real_samples = 0
        first: list[Any] = []
        waiting: list[Any] = []
        for sample in self.dataset:
            waiting.append(sample)
            if len(waiting) == block:
                first = first or waiting
                yield from waiting[mine]
                waiting = []
        if waiting and not self.drop_last:
            self.real_samples = len(waiting)
            if self.even_batches:
                waiting = list(islice(chain(waiting, cycle(first or waiting)), block))
            yield from waiting[mine]

    def _sizes(self) -> tuple[int, int]:
        """Samples per round of this process, and of all."""
        if self.split_batches:
            return self.batch_size // self.num_processes, self.batch_size
        return self.batch_size, self.batch_size * self.num_processes


class DealtSampler:
    """Every so-many-th item of a sampler or batch sampler: none twice, none left out. Local.

    Args:
        sampler: what gives indices, or lists of them; the same on every process.
        num_processes: how many processes share it.
        process_index: the index of this one.
    """

    def __init__(self, sampler: Any, num_processes: int, process_index: int) -> None:
        self.sampler = sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.batch_size: int | None = getattr(sampler, "batch_size", None)
        self.real_samples = -1

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many items as the others."""
        total = loader_length(self.sampler)
        return total is not None and total % self.num_processes == 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.process_index, None, self.num_processes)

    def __len__(self) -> int:
        return batches_of_process(len(self.sampler), self.num_processes, self.process_index)


def _reaches_all(rest: int, num_processes: int, share: int) -> bool:
    """Whether the samples of a last round are enough for each process to get some, or none does."""
    return rest == 0 or rest > share * (num_processes - 1)


def batches_of_process(total: int, num_processes: int, process_index: int) -> int:
    """How many of `total` batches a process gets that are dealt in turn, with nothing added or left out."""
    return total // num_processes + (process_index < total % num_processes)


def filled(batches: Sequence[Sequence[int]], first: Sequence[Sequence[int]], size: int, index: int) -> list[int]:
    """The `index`-th batch of a last round, filled up sample by sample from the first round, again and again."""
    stream = chain(chain.from_iterable(batches), cycle(chain.from_iterable(first)))
    return list(islice(stream, size * index, size * (index + 1)))


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


def check_place(owner: str, num_processes: int, process_index: int) -> None:
    """Refuse an index that is none of the processes.

    Raises:
        ConfigError: says what came.
    """
    check_integer(f"{owner}(num_processes)", num_processes, 1)
    check_integer(f"{owner}(process_index)", process_index, 0)
    if process_index >= num_processes:
        raise ConfigError(
            f"{owner}(process_index={process_index}) with num_processes={num_processes}. Expected an index below it."
        )


def check_split(batch_size: int | None, num_processes: int, owner: str) -> None:
    """Refuse to split batches of no fixed size, or of one that is no multiple of the number of processes.

    Raises:
        ConfigError: says what came and what to do.
    """
    if batch_size is None:
        raise ConfigError(
            f"split_batches=True with a {owner} that has no batch_size: batches of any sizes can't be split evenly. "
            "Leave split_batches out, so that whole batches are dealt, or give it a batch_size."
        )
    if batch_size % num_processes:
        raise ConfigError(
            f"split_batches=True: a batch size of {batch_size} can't be split evenly among {num_processes} processes. "
            f"Use a multiple of {num_processes}, or leave split_batches out, so that it is that of each process."
        )
