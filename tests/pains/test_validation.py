"""Pains 14 and 15: validation leaves no trace in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.trainer.task import Task

from ..trainer.tiny import Recorder, Scalar, fit, trainer


class Dropout(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))

    def step(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.step(batch))
        torch.rand(3)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def weights(validates: bool, shuffles: bool = False, **options: Any) -> tuple[Tensor, int]:
    recorder = Recorder()
    found = trainer(seed=0, max_epochs=3, callbacks=recorder, **options)
    task = Dropout()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
    val = DataLoader(data, 8, shuffle=shuffles) if validates else None
    found.fit(task, DataLoader(data, 4, shuffle=True), val)
    return nn.utils.parameters_to_vector(task.parameters()).detach(), recorder.count("validation_end")


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 3), ({"val_every": "2 epochs"}, 1), ({"val_every": "3 steps"}, 8), ({"sanity_val_batches": 2}, 3),
        ({"shuffles": True}, 3), ({"shuffles": True, "sanity_val_batches": 4, "val_every": ["first", "2 epochs"]}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_pain_14_bit_equal_weights_with_and_without_validation(options: Any, count: int) -> None:
    alone, none = weights(False)
    assert none == 0
    found, times = weights(True, **options)
    assert times == count
    assert torch.equal(found, alone)


def test_pain_14_also_where_both_loaders_share_a_generator() -> None:
    def order(validates: bool) -> list[float]:
        seen: list[float] = []

        class Keeps(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                seen.append(batch.item())
                return super().training_step(batch, batch_idx)

        generator = torch.Generator().manual_seed(0)
        data: Any = torch.arange(8.0)
        train, val = (DataLoader(data, shuffle=True, generator=generator) for _ in range(2))
        fit(Keeps(), train, val if validates else None, max_epochs=3, sanity_val_batches=2, val_every="3 steps")
        return seen

    assert order(True) == order(False)


def test_pain_14_the_comparison_would_see_a_difference() -> None:
    alone, _ = weights(False)
    other, _ = weights(False, accumulate=2)
    assert not torch.equal(alone, other)


class Frozen(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.norm.eval()
        self.modes: list[tuple[bool, bool]] = []
        self.fails = False

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.modes.append((self.training, self.norm.training))
        if self.fails and not self.training:
            raise ValueError("broken")
        return self.norm(self.net(batch)).mean()

    training_step = validation_step = test_step = predict_step = step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.randn(3, 2)] * 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_pain_15_flags_are_as_before(stage: str, fails: bool) -> None:
    task = Frozen()
    task.fails = fails
    before = [module.training for module in task.modules()]
    data = (BATCHES, BATCHES) if stage == "fit" else (BATCHES,)
    if fails:
        with pytest.raises(ValueError, match="broken"):
            getattr(trainer(), stage)(task, *data)
    else:
        getattr(trainer(), stage)(task, *data)
    assert [module.training for module in task.modules()] == before
    assert torch.is_grad_enabled()


def test_pain_15_the_parent_trains_and_the_frozen_child_does_not() -> None:
    task = Frozen()
    fit(task, BATCHES, BATCHES)
    assert task.modes == [(True, False)] * 2 + [(False, False)] * 2
    assert task.norm.running_mean is not None
    assert task.norm.running_mean.tolist() == [0, 0]
    assert task.norm.num_batches_tracked == 0


def test_pain_15_a_model_in_eval_mode_is_trained_in_training_mode() -> None:
    task = Frozen().eval()
    fit(task, BATCHES)
    assert task.modes == [(True, True)] * 2
    assert not any(module.training for module in task.modules())
