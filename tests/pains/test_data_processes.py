"""What hurts elsewhere, on two processes; what a loader alone shows of it. Numbers: spec/pains.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.distributed.process import ProcessState


def prepared(loader: Any, **options: Any) -> PreparedLoader:
    """The loader of this process."""
    return prepare_loader(
        loader,
        process=ProcessState(cpu=True),
        configuration=DataLoaderConfiguration(),
        device=torch.device("cpu"),
        active=[],
        **options,
    )


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def evaluated() -> list[list[int]]:
    """What this process sees of five samples, shuffled or in order, as lists, streams and loaders."""
    torch.manual_seed(ProcessState(cpu=True).process_index)
    data = list(range(5))
    loaders = [
        DataLoader(data, batch_size=2),
        DataLoader(data, batch_size=2, shuffle=True),
        DataLoader(Stream(), batch_size=2),
        [torch.tensor([number]) for number in data],
    ]
    return [[sample for batch in prepared(loader, exact=True) for sample in batch.tolist()] for loader in loaders]


def test_pain_11_each_of_5_samples_counts_once(two_processes: Any) -> None:
    for first, second in zip(*two_processes(evaluated), strict=True):
        seen = first + second
        assert sorted(seen) == [0, 1, 2, 3, 4]
        assert sum(seen) / len(seen) == 2.0


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand((), dtype=torch.float64)


def noise() -> list[float]:
    """Two passes by two workers."""
    loader = prepared(DataLoader(Noise(), batch_size=1, num_workers=2))
    return [float(batch) for _ in range(2) for batch in loader]


def test_pain_32_noise_is_distinct_and_equal_on_a_re_run(two_processes: Any) -> None:
    found = two_processes(noise)
    assert len({number for numbers in found for number in numbers}) == 16
    assert two_processes(noise) == found
