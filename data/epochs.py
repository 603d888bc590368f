"""What worker processes are told: which epoch it is, and which dataset is theirs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .around import DatasetAround
from .shards import IterableDatasetShard


class _EpochInSharedMemory:
    """Tells a dataset's copies in persistent workers which epoch it is, by a number in shared memory."""

    dataset: Any

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._told = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, and its copies as soon as they are read again."""
        self._epoch.fill_(epoch)
        self._told = epoch
        self.dataset.set_epoch(epoch)

    def _tell(self) -> None:
        epoch = int(self._epoch)
        if epoch != self._told:
            self._told = epoch
            self.dataset.set_epoch(epoch)


class ToldDataset(_EpochInSharedMemory, Dataset[Any]):
    """A map-style dataset whose copies in persistent workers are told the epoch."""

    def __len__(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        self._tell()
        return self.dataset[index]

    @property
    def __getitems__(self) -> Callable[[list[Any]], Any] | None:
        if getattr(self.dataset, "__getitems__", None) is None:
            return None
        self._tell()
        return self.dataset.__getitems__  # type: ignore[no-any-return]


class ToldIterableDataset(_EpochInSharedMemory, IterableDataset[Any]):
    """An iterable dataset whose copies in persistent workers are told the epoch."""

    def __len__(self) -> int:
        """Samples in the dataset. Raises TypeError where it has no length."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self._tell()
        return iter(self.dataset)


class WorkerStart:
    """A `worker_init_fn` that shows the user's own dataset to the user's own function and to `get_worker_info`.

    It also lets the worker outlive a SIGTERM that everybody gets: who reads from it ends in order, and needs its
    batches until then.

    Args:
        worker_init_fn: the user's, or None.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # torch guards these against changes; what is shown is what the user gave to the loader.
        object.__setattr__(info, "dataset", own_dataset(info.dataset))
        # torch's handler ends a worker whose parent did not send the signal: launchers and SLURM send it to all.
        signal.signal(signal.SIGTERM, _end_at_the_next)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _end_at_the_next(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)


def own_dataset(dataset: Any) -> Any:
    """The user's dataset, without what was put around it here."""
    while isinstance(dataset, (DatasetAround, *TELLERS)):
        dataset = dataset.dataset
    return dataset


TELLERS = (_EpochInSharedMemory, IterableDatasetShard)
"""Datasets around the user's, which tell it the epoch themselves."""
