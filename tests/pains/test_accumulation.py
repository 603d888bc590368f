"""Pains 1, 3 and 25: windows and intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.trainer.task import Task

from ..trainer.tiny import Loss, Scalar, Watch, batches, fit, ones, tracked


class Tokens(Task):
    """SGD with rate 1 on w = 0; each token's loss is w * x, and NaN tokens are none."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        valid = batch[~batch.isnan()]
        return (self.w * valid).sum(), valid.numel()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


NAN = float("nan")
A = torch.tensor([1.0, NAN, NAN])  # one valid token with gradient 1
B = torch.tensor([0.0, 0.0, 0.0])  # three with gradient 0


@pytest.mark.parametrize(
    ("data", "accumulate"),
    [([A, B], 2), ([B, A], 2), ([torch.stack([A, B])], 1)],
    ids=["AB", "BA", "one batch of both"],
)
def test_pain_01_unequal_token_counts(data: list[Tensor], accumulate: int) -> None:
    task = Tokens()
    fit(task, data, accumulate=accumulate)
    assert task.w.item() == pytest.approx(-0.25, abs=1e-7)


def test_pain_01_a_mean_and_its_count_are_the_same_pair() -> None:
    class Means(Tokens):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss_sum, count = super().training_step(batch, batch_idx)
            mean = loss_sum / count
            return mean * count, count

    task = Means()
    fit(task, [A, B], accumulate=2)
    assert task.w.item() == pytest.approx(-0.25, abs=1e-7)


def test_pain_03_a_short_last_window() -> None:
    seen: list[float] = []
    task = Scalar()
    watch = Watch(step=lambda trainer, task, outcome: seen.append(task.value))
    found = fit(task, ones(5), accumulate=2, callbacks=watch)
    assert seen == [-1, -2, -3]
    assert found.state.step == 3


@pytest.mark.filterwarnings("ignore:accumulate=8 but an epoch has 5 batches")
@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_pain_03_the_logged_loss_is_not_scaled(accumulate: int) -> None:
    records = tracked(Loss(on_epoch=True), ones(5), accumulate=accumulate, log_every=1)
    assert {metrics.get("loss_step", metrics.get("loss_epoch")) for _, metrics in records} == {1.0}


@pytest.mark.filterwarnings("ignore:accumulate=8 but an epoch has 5 batches")
def test_pain_03_a_window_longer_than_the_epoch() -> None:
    task = Scalar()
    found = fit(task, ones(5), accumulate=8)
    assert (found.state.step, task.value) == (1, pytest.approx(-1))


def test_pain_25_intervals_count_optimizer_steps_whatever_the_accumulation() -> None:
    for accumulate, batches_per_epoch in ((3, 8), (1, 3), (2, 5), (8, 24)):
        seen: list[int] = []
        watch = Watch(validation_start=lambda trainer, task, seen=seen: seen.append(trainer.state.step))
        found = fit(
            Scalar(), batches(*[1] * batches_per_epoch), ones(1),
            val_every="2 steps", accumulate=accumulate, max_epochs=2, callbacks=watch,
        )  # fmt: skip
        assert found.state.step == 6
        assert seen == [2, 4, 6], accumulate
