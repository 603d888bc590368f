"""`LoaderAround`: what a loader that stands around the user's says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..distributed.errors import ConfigError
from .around import own_sampler
from .counting import CountingCollate
from .epochs import own_dataset
from .rounds import Dealer
from .shards import BatchSamplerShard, sample_count
from .sizes import loader_length


class LoaderAround:
    """The base of a loader around another one, with the properties of a `DataLoader`.

    Args:
        loader: any iterable of batches, or what deals one out.
        num_processes: how many processes share it.
        dealer: what gives this process its share; None: the loader was not shared.
    """

    def __init__(self, loader: Iterable[Any], num_processes: int, dealer: Dealer | None) -> None:
        self.loader = loader
        self.num_processes = num_processes
        self.dealer = dealer

    @property
    def dataset(self) -> Any:
        """The wrapped loader's dataset, as the user gave it. Raises AttributeError where it has none."""
        return own_dataset(self.loader.dataset)  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> int | None:
        """Samples per batch of the wrapped loader, None where it has no fixed size."""
        return self._option("batch_size")  # type: ignore[no-any-return]

    @property
    def total_batch_size(self) -> int | None:
        """Samples per batch over all processes, None where there is no fixed size."""
        size = self.batch_size
        if size is None:  # a loader with a batch sampler of its own does not say it
            batches = self.sampler if self.batch_sampler is None else self.batch_sampler
            size = getattr(batches, "batch_size", None)
        return size if size is None or self.splits_batches else size * self.num_processes

    @property
    def splits_batches(self) -> bool:
        """Whether the wrapped loader's batch size is that of all processes together."""
        return self.dealer is not None and self.dealer.split_batches

    @property
    def is_even(self) -> bool:
        """Whether each process is known to get as many batches as the others."""
        return self.dealer is None or self.dealer.is_even

    @property
    def even_batches(self) -> bool | None:
        """Whether the last round is completed, so that each process gets as many batches; None where that is fixed."""
        return None if self.dealer is None else self.dealer.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if self.even_batches is None:
            raise ConfigError(
                f"even_batches={value!r}: this loader's rounds are not completed by choice. It can be set for loaders "
                "that each process reads itself (dispatch_batches=False), with several processes."
            )
        self.dealer.even_batches = value  # type: ignore[union-attr]

    @property
    def total_dataset_length(self) -> int | None:
        """Samples in the dataset, None where it has no length."""
        dataset = own_dataset(self._option("dataset"))
        return None if dataset is None else loader_length(dataset)

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return own_sampler(self._option("sampler"))

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return own_sampler(self._option("batch_sampler"))

    @property
    def drop_last(self) -> bool:
        """Whether the wrapped loader leaves out a short last batch."""
        return bool(self._option("drop_last"))

    @property
    def collate_fn(self) -> Any:
        """What makes a batch of samples, None where the loader does not say."""
        return self._option("collate_fn")

    @property
    def num_workers(self) -> int:
        """The wrapped loader's worker processes."""
        return self._option("num_workers") or 0

    @property
    def pin_memory(self) -> bool:
        """Whether batches are put into pinned memory."""
        return bool(self._option("pin_memory"))

    @property
    def generator(self) -> torch.Generator | None:
        """The wrapped loader's generator."""
        return self._option("generator")  # type: ignore[no-any-return]

    @property
    def counts_samples(self) -> bool:
        """Whether the wrapped loader's batches are `Counted`."""
        return isinstance(getattr(self.loader, "collate_fn", None), CountingCollate)

    def planned_remainder(self) -> int:
        """Samples in a pass's short last round over all processes, as far as that is known before; see `remainder`."""
        size = self.total_batch_size
        if self.drop_last or size is None or getattr(self.batch_sampler, "drop_last", False):
            return -1
        if self.dealer is not None:
            samples = sample_count(self.dealer.batch_sampler) if isinstance(self.dealer, BatchSamplerShard) else None
        elif self.batch_size is None:
            samples = sample_count(self.batch_sampler)
        else:
            samples = loader_length(self.sampler)
            samples = self.total_dataset_length if samples is None else samples
        return -1 if samples is None else samples % size

    def _option(self, name: str) -> Any:
        loader: Any = self.loader
        while loader is not None:
            if (found := getattr(loader, name, None)) is not None:
                return found
            loader = getattr(loader, "loader", None)  # of a dealt or dispatched loader
        return None
