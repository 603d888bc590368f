"""How a pass is dealt out to processes: in rounds, in each of which every process gets one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, TypeVar

from ..distributed.errors import ConfigError, check_integer
from .sizes import loader_length

T = TypeVar("T")


class Dealer(ABC):
    """What gives a process its share of a pass: a shard of samplers or datasets, a dealt or dispatched loader.

    Args:
        num_processes: how many processes share the pass.
        process_index: the index of this one.
        split_batches: each batch is cut into as many parts as there are processes; else each is one process's.
        even_batches: the last round is completed, so that each process gets as many batches as the others; None where
            that is no choice.
        drop_last: the last round is left out if it is not full.
    Raises:
        ConfigError: an index that is none of the processes.
    """

    def __init__(
        self,
        num_processes: int,
        process_index: int,
        *,
        split_batches: bool = False,
        even_batches: bool | None = None,
        drop_last: bool = False,
    ) -> None:
        _check_place(type(self).__name__, num_processes, process_index)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.drop_last = drop_last
        self.real_samples = -1
        """Samples in the last round over all processes, without those that complete it; 0 where it was full; -1 if
        unknown.
        """

    @property
    @abstractmethod
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""

    def round_sizes(self) -> list[int] | None:
        """Samples of all processes in each round of a pass, with those that complete it. Local.

        Returns:
            None where they are not known before the pass.
        """
        return None


def rounds_of(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of that size, of which the last one may be shorter; none is read ahead."""
    iterator = iter(items)
    while True:
        found = list(islice(iterator, size))
        if found:
            yield found
        if len(found) < size:
            return


def completed(items: Sequence[T], first: Sequence[T], count: int) -> list[T]:
    """As many items as `count`: these, and then the first ones of the pass, again and again."""
    return list(islice(chain(items, cycle(first)), count))


def num_dealt(
    total: int, num_processes: int, process_index: int, *, drop_last: bool = False, even_batches: bool = False
) -> int:
    """How many of `total` batches a process gets that are dealt whole and in turn.

    Args:
        total: all batches of a pass.
        num_processes: how many processes share them.
        process_index: the index of this one.
        drop_last: a round that is not full is left out.
        even_batches: it is completed, unless it is left out.
    """
    rounds, rest = divmod(total, num_processes)
    gets_one_more = rest > 0 if even_batches else process_index < rest
    return rounds + (gets_one_more and not drop_last)


def is_in_full_rounds(loader: Any, num_processes: int) -> bool:
    """Whether the items of a loader or sampler are known to be as many for each process."""
    total = loader_length(loader)
    return total is not None and total % num_processes == 0


def _check_place(owner: str, num_processes: int, process_index: int) -> None:
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
