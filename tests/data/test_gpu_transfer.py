"""Batches go to the device beside the computation. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.data.window import WindowReader

pytestmark = pytest.mark.gpu


class Alone:
    num_processes, process_index = 1, 0


def prepared(loader: Any, **options: Any) -> PreparedLoader:
    return prepare_loader(
        loader,
        process=Alone(),
        configuration=DataLoaderConfiguration(**options),
        device=torch.device("cuda", 0),
        active=[],
    )


def large_batches(pin_memory: bool) -> DataLoader[Any]:
    """24 rows of one number each, 4 to a batch."""
    data = torch.arange(24.0)[:, None].expand(24, 1 << 18).contiguous()
    return DataLoader(TensorDataset(data), batch_size=4, pin_memory=pin_memory)


def used(batches: Iterable[Any]) -> list[float]:
    """The number of each row, found while the device is busy: a copy that came too late or too early shows in it."""
    busy = torch.randn(2048, 2048, device="cuda")
    means = []
    for (batch,) in batches:
        assert batch.device.type == "cuda"
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        means.append(batch.mean(dim=1))
        del batch
    return torch.cat(means).tolist()


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_batches_arrive_whole_while_the_device_is_busy(lookahead: int, pin_memory: bool) -> None:
    loader = prepared(large_batches(pin_memory))
    loader.lookahead = lookahead
    for _ in range(2):
        assert used(loader) == list(range(24))


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_those_of_windows_arrive_whole_as_well(size: int, pin_memory: bool) -> None:
    reader = WindowReader(prepared(large_batches(pin_memory)), size)
    moved = (reader.on_device(window, position) for window in reader for position in range(len(window.batches)))
    assert used(moved) == list(range(24))


@pytest.mark.parametrize("pin_memory", [True, False])
def test_the_copy_of_the_next_batch_does_not_wait_for_the_present_one(pin_memory: bool) -> None:
    transfer = prepared(large_batches(pin_memory)).transfer()
    assert transfer is not None
    ahead = list(large_batches(pin_memory))
    transfer.next(ahead[0], ahead[1:])
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # the first batch is being used, for a second or so
    done.record()
    transfer.next(ahead[1], ahead[2:])
    arrived = torch.cuda.Event()
    assert transfer._side is not None
    with transfer._side.used():
        arrived.record()
    arrived.synchronize()
    assert not done.query()
    done.synchronize()


def test_batches_in_ordinary_memory_arrive_as_well() -> None:
    batches = [{"x": torch.full((3,), float(number)), "name": "a"} for number in range(4)]
    found = [
        (batch["x"].tolist(), batch["x"].device.type, batch["name"]) for batch in prepared(batches, non_blocking=True)
    ]
    assert found == [([float(number)] * 3, "cuda", "a") for number in range(4)]
