"""Pains 13, 16 and 17: the numbers that are shown."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.distributed.errors import MetricError, NonFiniteError
from loopwright.trackers.memory import MemoryTracker

from ..trainer.tiny import Loss, Scalar, Watch, batches, fit, ones, tracked, trainer


class Values(Scalar):
    """Logs the mean of the batch's samples, which are 0 to 4 in batches of 2, 2 and 1."""

    def __init__(self, reduce: Any = "mean", says_size: bool = False) -> None:
        super().__init__()
        self.reduce, self.says_size = reduce, says_size

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = len(batch["x"]) if self.says_size else None
        self.log("a", batch["x"].mean() if self.reduce == "mean" else 1, reduce=self.reduce, batch_size=size)


DATA = [{"first": torch.zeros(7), "x": torch.tensor(values)} for values in ([0.0, 1.0], [2.0, 3.0], [4.0])]


def test_pain_13_the_weight_of_a_mean_is_never_guessed() -> None:
    with pytest.raises(MetricError, match=r"batch\['first'\] has 7, batch\['x'\] has 2. Pass batch_size= to self.log"):
        trainer().validate(Values(), DATA)
    assert trainer().validate(Values(says_size=True), DATA) == {"a": 2.0}


def test_pain_13_a_sum_has_no_weight() -> None:
    assert trainer().validate(Values("sum"), DATA) == {"a": 3}
    assert trainer().validate(Values("sum", says_size=True), DATA) == {"a": 3}


def test_pain_16_a_nan_shows_in_the_record() -> None:
    records = tracked(Loss(on_epoch=True), batches(1, 2, math.nan, 4), log_every=1)
    steps = {step: metrics["loss_step"] for step, metrics in records if "loss_step" in metrics}
    assert [math.isnan(value) for value in steps.values()] == [False, False, True, False]
    assert math.isnan(records[-1][1]["loss_epoch"])


def test_pain_16_a_nan_batch_shows_in_an_evaluation() -> None:
    assert math.isnan(trainer().validate(Scalar(), batches(1, math.nan, 3))["val"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pain_16_the_guard_names_the_step(accumulate: int) -> None:
    class Breaks(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 2 else 1)

    task = Breaks()
    with pytest.raises(NonFiniteError, match=r"batch 2"):
        fit(task, ones(5), accumulate=accumulate, callbacks=NaNGuard())
    assert math.isfinite(task.value)


def test_pain_17_metrics_belong_to_the_step_that_they_were_measured_at() -> None:
    class Scripted(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.values = iter([3.0, 1.0, 2.0])

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", next(self.values))

    memory = MemoryTracker()
    seen: list[tuple[int, float]] = []
    fit(
        Scripted(), ones(30), ones(1), val_every="10 steps", trackers=memory, log_every="10 steps",
        callbacks=Watch(
            validation_end=lambda trainer, task, metrics: seen.append((trainer.state.step, trainer.metrics["val_loss"]))
        ),
    )  # fmt: skip
    assert seen == memory.runs[0].series("val_loss") == [(10, 3), (20, 1), (30, 2)]
