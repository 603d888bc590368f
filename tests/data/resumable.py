"""Data that draws by every stream, and loaders of each kind, for the tests of seeds and positions."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from loopwright.data.combined import CombinedLoader
from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader

SIZE = 13


@dataclass
class Place:
    """A process among others, without a process group."""

    process_index: int = 0
    num_processes: int = 1


def noise() -> list[float]:
    """One number of each stream."""
    return [random.random(), float(numpy.random.rand()), float(torch.rand((), dtype=torch.float64))]


class Noisy(Dataset[Tensor]):
    """Each item is its index and noise."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.tensor([float(index), *noise()], dtype=torch.float64)


class NoisyTogether(Noisy):
    """The same, read several at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        shared = noise()[0]
        return [self[index] + torch.tensor([0, shared, 0, 0], dtype=torch.float64) for index in indices]


class NoisyStream(IterableDataset[Tensor]):
    """Numbers and noise; the pass itself draws where it begins."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        offset = random.randrange(1000)
        return (torch.tensor([float(index + offset), *noise()], dtype=torch.float64) for index in range(self.size))


class NoisyShuffledStream(NoisyStream):
    """A stream that shuffles by the seed of the epoch it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (torch.tensor([float(index), *noise()], dtype=torch.float64) for index in order)


class StatefulStream(NoisyStream):
    """A stream that goes on where its state says, and counts what it reads."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.position = self.start = self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.start = self.start, 0
        while self.position < self.size:
            self.position += 1
            self.num_read += 1
            yield torch.tensor([float(self.position - 1), *noise()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.position = state["position"]


class DrawingSampler(Sampler[int]):
    """A user's sampler: a permutation from torch's random state, and a draw for each index."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        while order:
            yield order.pop(random.randrange(len(order)) if numpy.random.rand() < 0.5 else -1)

    def __len__(self) -> int:
        return SIZE


class RaggedBatches(Sampler[list[int]]):
    """A user's batch sampler, whose batches have any sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        for start, stop in ((0, 1), (1, 4), (4, 6), (6, 10), (10, 13)):
            yield order[start:stop]

    def __len__(self) -> int:
        return 5


class OwnLoader:
    """A loader that is no DataLoader; its batches are noise."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([[float(index), *noise()]], dtype=torch.float64) for index in range(6))


def jittered(samples: list[Tensor]) -> Tensor:
    """A collate function that draws."""
    return torch.stack(samples) + torch.rand((), dtype=torch.float64)


def stateful(*args: Any, **options: Any) -> Any:
    """torchdata's loader."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(*args, **options)


MAKERS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda **o: DataLoader(Noisy(), batch_size=2, shuffle=True, **o),
    "together": lambda **o: DataLoader(NoisyTogether(), batch_size=2, collate_fn=jittered, **o),
    "own_sampler": lambda **o: DataLoader(Noisy(), batch_size=2, sampler=DrawingSampler(), **o),
    "ragged": lambda **o: DataLoader(Noisy(), batch_sampler=RaggedBatches(), **o),
    "generator": lambda **o: DataLoader(
        Noisy(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(8), **o
    ),
    "single": lambda **o: DataLoader(Noisy(), batch_size=None, shuffle=True, **o),
    "stream": lambda **o: DataLoader(NoisyStream(), batch_size=2, **o),
    "shuffled_stream": lambda **o: DataLoader(NoisyShuffledStream(), batch_size=2, **o),
    "stateful_stream": lambda **o: DataLoader(StatefulStream(), batch_size=2, **o),
    "stateful_loader": lambda **o: stateful(Noisy(), batch_size=2, shuffle=True, **o),
    "stateful_loader_stream": lambda **o: stateful(StatefulStream(), batch_size=2, **o),
    "stateful_loader_plain_stream": lambda **o: stateful(NoisyStream(), batch_size=2, **o),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "own_loader": OwnLoader,
    "combined": lambda: CombinedLoader({"a": MAKERS["shuffle"](), "b": MAKERS["single"]()}, mode="max_size_cycle"),
    "sequential": lambda: CombinedLoader([MAKERS["shuffle"](), MAKERS["stream"]()], mode="sequential"),
    "combined_stateful": lambda: CombinedLoader([MAKERS["stateful_stream"](), OwnLoader()], mode="max_size"),
}


def prepared(loader: Any, index: int = 0, w: int = 1, **options: Any) -> PreparedLoader:
    """A loader with the data's own random stream."""
    configuration = DataLoaderConfiguration(**{"seed_batches": True, "dispatch_batches": False} | options)
    torch.manual_seed(3)
    return prepare_loader(
        loader, process=Place(index, w), configuration=configuration, device=torch.device("cpu"), active=[]
    )


def read(loader: PreparedLoader, epoch: int, count: int | None = None) -> list[Any]:
    """The batches of a pass, as the Trainer reads them, as plain lists; at most `count` of them."""
    loader.set_epoch(epoch)
    iterator = loader.raw_iterator()
    found: list[Any] = []
    while count is None or len(found) < count:
        batch = next(iterator, None)
        if batch is None:
            break
        found.append(plain(batch))
    return found


def plain(batch: Any) -> Any:
    """A batch without tensors."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def draws() -> list[float]:
    """What the training's streams would give next; they are left as they are."""
    from loopwright.distributed.random import preserved_random_state

    with preserved_random_state(torch.device("cpu")):
        return noise()
