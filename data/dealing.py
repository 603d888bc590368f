"""`DealtLoader`: one process's share of any iterable of batches, which every process reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from .joining import parts_of, samples_in
from .rounds import completed, is_in_full_rounds, num_dealt, rounds_of


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
        return is_in_full_rounds(self.loader, self.num_processes)

    def __len__(self) -> int:
        """Batches that this process gets. Raises TypeError where the loader has no length."""
        total = len(self.loader)  # type: ignore[arg-type]
        if self.split_batches:
            return total
        return num_dealt(
            total, self.num_processes, self.process_index, drop_last=self.drop_last, even_batches=self.even_batches
        )

    def __iter__(self) -> Iterator[Any]:
        self.real_samples = -1
        if self.split_batches:
            return self._parts()
        if not self.even_batches and not self.drop_last:
            return islice(iter(self.loader), self.process_index, None, self.num_processes)
        return self._dealt()

    def _dealt(self) -> Iterator[Any]:
        first: list[Any] = []
        for batches in rounds_of(self.loader, self.num_processes):
            if len(batches) == self.num_processes:
                first = first or batches
                self.real_samples = 0
            elif self.drop_last:
                return
            else:
                self.real_samples = samples_in(batches)
                batches = completed(batches, first or batches, self.num_processes)
            yield batches[self.process_index]

    def _parts(self) -> Iterator[Any]:
        first: list[Any] = []
        for batch in self.loader:
            first = first or [batch]
            parts, size = parts_of([batch], first, self.num_processes)
            self.real_samples = size if size % self.num_processes else 0
            yield parts[self.process_index]
