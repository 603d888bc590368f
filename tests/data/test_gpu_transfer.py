"""Batches go to the device beside the computation. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.data.transfer import has_streams


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


def test_a_cpu_has_no_streams() -> None:
    assert not has_streams(torch.device("cpu"))
    assert not has_streams(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [1, 3])
def test_pinned_batches_arrive_whole_while_the_device_is_busy(lookahead: int) -> None:
    """Each batch is large, and used by long computations; a copy that came too late or too early shows in the sums."""
    data = torch.arange(24.0)[:, None].expand(24, 1 << 18).contiguous()
    loader = prepared(DataLoader(TensorDataset(data), batch_size=4, pin_memory=True))
    loader.lookahead = lookahead
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(2):
        sums = []
        for (batch,) in loader:
            assert batch.device.type == "cuda"
            for _ in range(10):
                busy = torch.tanh(busy @ busy)
            sums.append(batch.mean(dim=1))
            del batch
        assert torch.cat(sums).tolist() == list(range(24))


@pytest.mark.gpu
def test_batches_in_ordinary_memory_arrive_as_well() -> None:
    batches = [{"x": torch.full((3,), float(number)), "name": "a"} for number in range(4)]
    found = [
        (batch["x"].tolist(), batch["x"].device.type, batch["name"]) for batch in prepared(batches, non_blocking=True)
    ]
    assert found == [([float(number)] * 3, "cuda", "a") for number in range(4)]
    moved = prepared(DataLoader(TensorDataset(torch.ones(2, 1)), pin_memory=True))
    assert moved.move(next(moved.raw_iterator()))[0].device.type == "cuda"
