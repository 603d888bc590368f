"""`LoaderDealer`, which deals the batches of a loader, and `DealtLoader`: one that every process reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from .joining import parts_of, samples_in
from .rounds import Dealer, completed, is_in_full_rounds, num_dealt, rounds_of
from .sizes import batch_sizes
from .skipping import batches_from, opened_at


class LoaderDealer(Dealer):
    """Deals the batches of a loader.

    Args:
        loader: any iterable of batches.
        num_processes: as for each `Dealer`; so are the others.
        even_batches: None: always.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        num_processes: int,
        process_index: int,
        *,
        split_batches: bool = False,
        even_batches: bool | None = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            num_processes, process_index, split_batches=split_batches, even_batches=even_batches, drop_last=drop_last
        )
        self.loader = loader

    @property
    def dataset(self) -> Any:
        """The loader's dataset. Raises AttributeError where it has none."""
        return self.loader.dataset  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Batches that this process gets. Raises TypeError where the loader has no length."""
        total = len(self.loader)  # type: ignore[arg-type]
        if self.split_batches:
            return total
        completes = self.even_batches is not False
        return num_dealt(
            total, self.num_processes, self.process_index, drop_last=self.drop_last, even_batches=completes
        )


class DealtLoader(LoaderDealer):
    """The batches that one process gets of an iterable of batches, dealt whole and in turn. Local.

    Every process reads all of it, so that it must give the same batches on each. The last round is completed with
    batches of the first.
    """

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        if self.split_batches or self.even_batches or self.drop_last:
            return True
        return is_in_full_rounds(self.loader, self.num_processes)

    def round_sizes(self) -> list[int] | None:
        """Samples of all processes in each round: known where all batches are alike, and so the completed ones."""
        sizes = batch_sizes(self.loader)
        if sizes is None or len(set(sizes)) != 1 or (self.split_batches and sizes[0] % self.num_processes):
            return None
        return [sizes[0] * (1 if self.split_batches else self.num_processes)] * len(self)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """A pass behind its first `num_skipped` batches of each process; the last round is that of the whole pass."""
        self.real_samples = -1
        if not self.split_batches and not self.even_batches and not self.drop_last:
            batches = batches_from(self.loader, num_skipped * self.num_processes)
            return islice(batches, self.process_index, None, self.num_processes)
        per_round = 1 if self.split_batches else self.num_processes
        first, batches = opened_at(self.loader, num_skipped * per_round, per_round)
        return self._parts(first, batches) if self.split_batches else self._dealt(first, batches)

    def _dealt(self, first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
        for batches in rounds_of(rest, self.num_processes):
            if len(batches) == self.num_processes:
                first = first or batches
                self.real_samples = 0
            elif self.drop_last:
                return
            else:
                self.real_samples = samples_in(batches)
                batches = completed(batches, first or batches, self.num_processes)
            yield batches[self.process_index]

    def _parts(self, first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            first = first or [batch]
            parts, size = parts_of([batch], first, self.num_processes)
            self.real_samples = size if size % self.num_processes else 0
            yield parts[self.process_index]
