"""`DealtLoader`: one process's share of any iterable of batches, which every process reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from .joining import completed, parts_of, samples_in
from .shards import batches_of_process
from .sizes import loader_length


class DealtLoader:
    """The batches that one process gets of an iterable of batches, dealt whole and in turn. Local.

    Every process reads all of it, so that it must give the same batches on each.

    Args:
        loader: any iterable of batches.
        num_processes: how many processes share it.
        process_index: the index of this one.
        split_batches: each batch is cut into as many parts as there are processes.
        even_batches: complete the last round with batches of the first.
        drop_last: leave out the last round if it is not full.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        num_processes: int,
        process_index: int,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.loader = loader
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
    def dataset(self) -> Any:
        """The loader's dataset. Raises AttributeError where it has none."""
        return self.loader.dataset  # type: ignore[attr-defined]

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        if self.split_batches or self.even_batches or self.drop_last:
            return True
        total = loader_length(self.loader)
        return total is not None and total % self.num_processes == 0

    def __len__(self) -> int:
        """Batches that this process gets. Raises TypeError where the loader has no length."""
        total = len(self.loader)  # type: ignore[arg-type]
        if self.split_batches:
            return total
        if self.drop_last:
            return total // self.num_processes
        if self.even_batches:
            return -(-total // self.num_processes)
        return batches_of_process(total, self.num_processes, self.process_index)

    def __iter__(self) -> Iterator[Any]:
        self.real_samples = -1
        if self.split_batches:
            return self._parts()
        if not self.even_batches and not self.drop_last:
            return islice(iter(self.loader), self.process_index, None, self.num_processes)
        return self._dealt()

    def _dealt(self) -> Iterator[Any]:
        first: list[Any] = []
        waiting: list[Any] = []
        for batch in self.loader:
            waiting.append(batch)
            if len(waiting) == self.num_processes:
                first = first or waiting
                yield waiting[self.process_index]
                waiting = []
        if self.drop_last:
            return
        self.real_samples = samples_in(waiting)
        if waiting:
            yield completed(waiting, first or waiting, self.num_processes)[self.process_index]

    def _parts(self) -> Iterator[Any]:
        first: list[Any] = []
        for batch in self.loader:
            first = first or [batch]
            parts, size = parts_of([batch], first, self.num_processes)
            self.real_samples = size if size % self.num_processes else 0
            yield parts[self.process_index]
