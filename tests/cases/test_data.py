"""Cases of the category data, by their ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopwright.distributed.errors import DataError
from loopwright.trainer.task import Task

from ..trainer.tiny import Recorder, Scalar, fit, ones, trainer


class Stream(IterableDataset[Tensor]):
    """So many items, in each pass or in the first alone."""

    def __init__(self, count: int, is_one_shot: bool = False) -> None:
        self.count, self.is_one_shot = count, is_one_shot

    def __iter__(self) -> Iterator[Tensor]:
        yield from ones(self.count)
        if self.is_one_shot:
            self.count = 0


@pytest.mark.parametrize(
    "make", [lambda: DataLoader([]), lambda: DataLoader(Stream(0)), list], ids=["no length", "no items", "list"]
)
def test_b55_training_data_without_a_batch(make: Any) -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"the training loader.*(has no batch|gave no batch)"):
        fit(Scalar(), make(), callbacks=recorder)
    assert recorder.count("fit_start") == recorder.count("fit_end")
    assert recorder.count("epoch_start") == recorder.count("epoch_end")
    assert recorder.count("setup") == recorder.count("teardown") == 1


def test_b55_a_limit_of_0() -> None:
    with pytest.raises(DataError, match="limit_batches leaves no training batch"):
        fit(Scalar(), ones(3), limit_batches=0)


@pytest.mark.parametrize("make", [lambda: DataLoader([]), lambda: DataLoader(Stream(0)), list])
def test_b55_validation_data_without_a_batch(make: Any) -> None:
    recorder = Recorder()
    with pytest.warns(UserWarning, match="the validation loader gave no batch"):
        found = fit(Scalar(), ones(3), make(), callbacks=recorder)
    assert found.state.step == 3
    assert "val" not in found.metrics
    assert recorder.count("validation_start") == recorder.count("validation_end") == 1


@pytest.mark.timeout(10)
def test_b56_a_one_shot_stream_with_a_large_limit_ends() -> None:
    with pytest.warns(UserWarning, match="the training loader gave no batch in epoch 1.*Training ends at step 10"):
        found = fit(Scalar(), DataLoader(Stream(10, is_one_shot=True), batch_size=None), max_steps=1000)
    assert found.state.step == 10


def test_b56_a_stream_that_begins_anew_reaches_it() -> None:
    assert fit(Scalar(), DataLoader(Stream(10), batch_size=None), max_steps=1000).state.step == 1000


class Draws(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        normal = torch.distributions.Normal(0.0, 1.0).sample()
        return torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item(), normal.item()])


def test_b58_workers_draw_their_own_numbers_in_each_epoch() -> None:
    class Keeps(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch[0])
            return self.w * 1

    def draws() -> Tensor:
        task = Keeps()
        fit(task, DataLoader(Draws(), num_workers=2), max_epochs=2, seed=0)
        return torch.stack(task.seen)  # (workers x epochs, streams)

    found = draws()
    assert found.shape == (4, 4)
    assert all(len(set(stream.tolist())) == 4 for stream in found.T)
    assert torch.equal(draws(), found)


class Norm(Task):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norm(batch)
        self.seen += len(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_b109_a_last_batch_of_one_sample_in_batch_norm() -> None:
    data = torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"(?s)batch 1 has 1 sample.*Use drop_last=True in the DataLoader"):
        fit(Norm(), DataLoader(data, 4))  # type: ignore[arg-type]
    assert fit(Norm(), DataLoader(data, 4, drop_last=True)).state.step == 1  # type: ignore[arg-type]
    task = Norm()
    trainer().validate(task, DataLoader(data, 4))  # type: ignore[arg-type]
    assert task.seen == 5
