"""Worker processes: the epoch that they are told, and the random numbers that they draw."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.epochs import ToldDataset
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.data.seeding import DataSeeds

pytestmark = pytest.mark.usefixtures("child_signal")


@pytest.fixture
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@dataclass
class Place:
    process_index: int
    num_processes: int


class Told(Dataset[Tensor]):
    """Each item is the epoch that this copy knows, and the mark of its worker."""

    epoch, mark = -1, -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.epoch, self.mark])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ToldStream(IterableDataset[Tensor]):
    epoch = -1

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        yield from (torch.tensor(self.epoch) for _ in range(4))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand((), dtype=torch.float64)


def mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = worker_id  # torch's documentation shows this


def prepared(loader: DataLoader[Any], index: int = 0, w: int = 1, **options: Any) -> PreparedLoader:
    configuration = DataLoaderConfiguration(dispatch_batches=False, **options)
    return prepare_loader(
        loader, process=Place(index, w), configuration=configuration, device=torch.device("cpu"), active=[]
    )


def close(loader: PreparedLoader) -> None:
    iterator: Any = loader.loader._iterator  # type: ignore[attr-defined]
    if iterator is not None:
        iterator._shutdown_workers()


@pytest.mark.parametrize("w", [1, 2])
def test_persistent_workers_are_told_the_epoch(w: int) -> None:
    inner = DataLoader(Told(), num_workers=1, persistent_workers=True, worker_init_fn=mark)
    loader = prepared(inner, w=w, data_seed=0)
    assert isinstance(loader.dataset, Told)
    passes = [torch.cat(list(loader)).tolist() for _ in range(2)]
    loader.set_epoch(7)
    passes.append(torch.cat(list(loader)).tolist())
    close(loader)
    assert passes == [[[epoch, 0]] * (4 // w) for epoch in (0, 1, 7)]
    assert loader.dataset.epoch == 7
    assert inner.dataset is loader.dataset


@pytest.mark.parametrize("w", [1, 2])
def test_persistent_workers_of_streams_are_told_the_epoch(w: int) -> None:
    loader = prepared(DataLoader(ToldStream(), num_workers=1, persistent_workers=True), w=w)
    passes = [torch.cat(list(loader)).tolist() for _ in range(3)]
    close(loader)
    assert passes == [[epoch] * (4 // w) for epoch in (0, 1, 2)]


def test_several_samples_are_read_at_once_where_the_dataset_can() -> None:
    class Several(Told):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self.epoch + index for index in indices]

    told = ToldDataset(Several())
    told.set_epoch(10)
    assert told.__getitems__([1, 2]) == [11, 12]  # type: ignore[misc]
    assert ToldDataset(Told()).__getitems__ is None
    assert len(told) == 4


def test_pain_32_noise_is_distinct_over_workers_processes_and_epochs_and_repeatable() -> None:
    def noise(index: int) -> list[float]:
        torch.manual_seed(0)  # the same in each process
        loader = prepared(DataLoader(Noise(), batch_size=1, num_workers=2), index, 2, even_batches=False)
        return [float(batch) for _ in range(2) for batch in loader]

    first, second = noise(0), noise(1)
    assert len(first) == len(second) == 4
    assert len(set(first + second)) == 8
    assert (noise(0), noise(1)) == (first, second)


def test_worker_seeds_are_those_of_the_epoch() -> None:
    seeds = DataSeeds(5, 1)
    first = seeds.generator.initial_seed()
    seeds.set_epoch(1)
    second = seeds.generator.initial_seed()
    seeds.set_epoch(0)
    assert seeds.generator.initial_seed() == first != second
    assert DataSeeds(5, 0).generator.initial_seed() not in (first, second)
    assert DataSeeds(6, 1).generator.initial_seed() != first


class Parts(IterableDataset[int]):
    """Ten numbers, each worker giving its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 10, info.num_workers))


def test_each_workers_added_samples_are_known() -> None:
    """Two workers with five numbers each, dealt to two processes by blocks of four: each adds three samples."""
    loaders = [prepared(DataLoader(Parts(), batch_size=2, num_workers=2), index, 2) for index in range(2)]
    seen: list[list[Any]] = [
        [(b.tolist(), loader.real_samples, loader.remainder) for b in loader] for loader in loaders
    ]
    assert [[item[1:] for item in each] for each in seen] == [[(None, -1), (None, -1), (1, -1), (1, 1)]] * 2
    kept = [
        sample
        for (first, real, _), (second, _, _) in zip(*seen, strict=True)
        for sample in (first + second)[: real or None]
    ]
    assert sorted(kept) == list(range(10))
