"""Cases of the category metrics, by their ids, and B70 as far as it is the Trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.distributed.errors import MetricError
from loopwright.trackers.memory import MemoryTracker

from ..trainer.tiny import Scalar, Scheduled, ones, trainer


class Logs(Scalar):
    def __init__(self, values: list[float], **options: Any) -> None:
        super().__init__()
        self.values, self.options = values, options

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("a", self.values[batch_idx], **self.options)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"a": torch.ones(n, 3), "b": torch.ones(n)},
        lambda n: (torch.ones(n, 3), torch.ones(n), torch.ones(n)),
        lambda n: {"names": ["a longer name"] * n, "inner": {"a": torch.ones(n, 3)}},
    ],
    ids=["mapping", "tuple", "nested with strings first"],
)
def test_b43_the_size_of_a_batch_is_that_of_its_tensors(make: Any) -> None:
    assert trainer().validate(Logs([1, 6]), [make(4), make(1)]) == {"a": 2.0}


def test_b43_an_ambiguous_size_asks_and_an_explicit_one_wins() -> None:
    data = [{"a": torch.ones(7), "b": torch.ones(n)} for n in (4, 1)]
    with pytest.raises(MetricError, match=r"can't be told: batch\['a'\] has 7, batch\['b'\] has 4. Pass batch_size="):
        trainer().validate(Logs([1, 6]), data)

    class Explicit(Logs):
        def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
            self.log("a", self.values[batch_idx], batch_size=len(batch["b"]))

    assert trainer().validate(Explicit([1, 6]), data) == {"a": 2.0}


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 6), ("max", 3), ("min", 1), ("mean", 2)])
def test_b44_only_a_mean_is_weighted(reduce: Any, expected: float) -> None:
    assert trainer().validate(Logs([1, 3, 2], reduce=reduce), [torch.ones(4)] * 3) == {"a": expected}
    ones_alone = trainer().validate(Logs([1, 1, 1], reduce="sum"), [torch.ones(4)] * 3)
    assert ones_alone == {"a": 3}


class Monotonic(MemoryTracker):
    """Rejects a smaller step, as some backends do."""

    last = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert step >= self.last, f"step {step} after {self.last}"
        self.last = step
        super().log(metrics, step)


def test_b70_one_axis_of_optimizer_steps() -> None:
    class Task(Scheduled):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("loss", batch.mean(), on_epoch=True)
            return super().training_step(batch, batch_idx)

    tracker = Monotonic()
    task = Task(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step")
    found = trainer(
        trackers=tracker, accumulate=2, log_every=1, val_every="4 batches", callbacks=LearningRateMonitor(),
    )  # fmt: skip
    found.fit(task, ones(8), ones(3))
    run = tracker.runs[0]
    steps = [step for step, _ in run.records]
    assert steps == sorted(steps)
    assert [step for step, _ in run.series("loss_step")] == [1, 2, 3, 4]
    assert [step for step, _ in run.series("val")] == [2, 4]
    rates = next(run.series(name) for name in run.records[0][1] if "lr" in name.lower())
    assert sorted(set(rates)) == [(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.0625)]
    # A validation of its own goes on where the training ended.
    found.validate(task, ones(3))
    assert tracker.runs[1].series("val") == [(4, 1)]
