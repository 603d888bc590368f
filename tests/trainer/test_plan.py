"""The plan: what it says is what `fit` does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.distributed.errors import DataError
from loopwright.trackers.memory import MemoryTracker

from .tiny import Scalar, ones, trainer


class Planned(Scalar):
    """Logs each step and validation; its schedule moves by steps or by epochs."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.interval = interval

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", 1.0)
        (x,) = batch
        return (self.w * x).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": ExponentialLR(optimizer, 0.5), "interval": self.interval, "frequency": 2,
        }}  # fmt: skip


class Watch(Callback):
    """What really happened."""

    def __init__(self) -> None:
        self.validated: list[int] = []
        self.rates: list[tuple[int, float]] = [(0, 1.0)]

    def on_validation_end(self, trainer: Any, task: Any, metrics: Any) -> None:
        self.validated.append(trainer.state.step)

    def look(self, trainer: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        if rate != self.rates[-1][1]:
            self.rates.append((trainer.state.step, rate))

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        self.look(trainer)

    def on_epoch_end(self, trainer: Any, task: Any, metrics: Any) -> None:
        self.look(trainer)

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        self.look(trainer)


def loader(samples: int, drop_last: bool = False) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, 1)), batch_size=4, drop_last=drop_last)


CONFIGURATIONS = [
    (data, dict(zip(("accumulate", "accumulate_across_epochs"), window, strict=True)) | limit, interval, val, log)
    for (data, window, limit), (interval, val, log) in zip(
        itertools.product(
            [loader(21), loader(21, drop_last=True), loader(8)],
            [(1, "flush"), (4, "flush"), (4, "carry"), (2, "drop")],
            [{"max_epochs": 3}, {"max_steps": 4}, {"max_epochs": 1.5}, {"max_steps": "50 samples"}],
        ),
        itertools.cycle([
            ("step", "1 epoch", "2 steps"), ("epoch", "3 steps", "1 epoch"),
            ("step", "0.5 epoch", ["first", "5 batches"]), ("epoch", ["2 epochs", "last"], "20 samples"),
            ("step", "7 batches", "never"),
        ]),
        strict=False,
    )
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:accumulate=4 but an epoch has 2 batches", "ignore:validation never ran")
@pytest.mark.parametrize(("data", "options", "interval", "val_every", "log_every"), CONFIGURATIONS)
def test_it_is_what_happens(data: Any, options: Any, interval: str, val_every: Any, log_every: Any) -> None:
    memory, watch = MemoryTracker(), Watch()
    found = trainer(callbacks=watch, trackers=memory, val_every=val_every, log_every=log_every, **options)
    plan = found.plan(Planned(interval), data, ones(1))
    assert plan.is_complete
    found.fit(Planned(interval), data, ones(1))
    state = found.state
    assert (plan.steps, plan.batches, plan.samples) == (state.step, state.micro_step, state.samples)
    assert plan.epochs == pytest.approx(state.epochs_done)
    assert plan.due["validation"] == watch.validated
    assert plan.due["log"] == [step for step, metrics in memory.runs[0].records if "train/loss" in metrics]
    assert plan.learning_rates == watch.rates
    assert plan.end == found.stop_reason.removesuffix(" reached")  # type: ignore[union-attr]


def test_the_report() -> None:
    found = trainer(
        max_epochs=2, accumulate=2, log_every="3 steps", callbacks=[EarlyStopping("val/los"), ModelCheckpoint()]
    )
    report = str(found.plan(Planned(), loader(21), ones(1))).splitlines()
    assert report == [
        "Run         6 steps, 12 batches, 2 epochs, 42 samples; ends at 2 epochs",
        "Epoch       6 batches, 3 steps",
        "Log         at steps 3, 6 (2 times)",
        "Validation  at steps 3, 6 (2 times)",
        "ModelCheckpoint at steps 3, 6 (2 times)",
        "Rate        1 from step 0, 0.5 from step 2, 0.25 from step 4, 0.125 from step 6",
        "Weights     1 tensors, 1 elements, 0.00 MB",
        *[line for line in report if line.startswith("Callback")],
        "Saves       ModelCheckpoint: the newest: weights, optimizers, counters, random states, data position",
        "Look at     EarlyStopping watches 'val/los', a name that neither a callback provides nor the task's "
        "code holds.",
    ]
    callbacks = [line.split()[1] for line in report if line.startswith("Callback")]
    assert callbacks == ["EarlyStopping:", "ModelCheckpoint:"]


class TestWithoutTrace:
    def test_optimizer_and_schedule_that_the_task_keeps(self) -> None:
        class Keeps(Scalar):
            def __init__(self) -> None:
                super().__init__()
                self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
                self.schedule = StepLR(self.optimizer, 1, gamma=0.5)

            def configure_optimizers(self) -> Any:
                return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

        task = Keeps()
        plan = trainer().plan(task, ones(4))
        assert plan.learning_rates[-1] == (4, 0.0625)
        assert (task.optimizer.param_groups[0]["lr"], task.schedule.last_epoch) == (1.0, 0)
        assert task.value == 0

    def test_hooks_see_the_trainer(self) -> None:
        class Asks(Scalar):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1.0 / self.trainer.limits.max_steps.amount)

        found, task = trainer(max_steps=4, max_epochs=None), Asks()
        assert found.plan(task, ones(2)).learning_rates == [(0, 0.25)]
        with pytest.raises(Exception, match="no trainer runs this task"):
            _ = task.trainer

    def test_inside_a_run(self) -> None:
        plans: list[int] = []
        found = trainer(max_epochs=2)
        found.on("step", lambda *_: None, once=True)
        found.on("epoch_end", lambda trainer, task, metrics: plans.append(trainer.plan(Scalar(), ones(3)).steps))
        found.fit(task := Scalar(), ones(2))
        assert (plans, task.value) == ([6, 6], -4)
        assert len(found.accelerator.preparation.optimizers) == 1


@pytest.mark.parametrize(
    ("sampler", "samples"),
    [
        (WeightedRandomSampler([1.0] * 20, 200), 200), (SubsetRandomSampler(range(5)), 5),
        (RandomSampler(range(20), num_samples=7), 7),
    ],
)  # fmt: skip
def test_samples_are_those_of_the_sampler(sampler: Any, samples: int) -> None:
    data = DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=4, sampler=sampler)
    found = trainer(max_steps="25 samples", max_epochs=None)
    plan = found.plan(Planned(), data)
    found.fit(Planned(), data)
    assert (plan.steps, plan.samples, plan.is_complete) == (found.state.step, found.state.samples, True)
    assert trainer().plan(Planned(), data).samples == samples


def test_a_loader_without_length() -> None:
    def stream() -> Any:
        yield from ones(4)

    plan = trainer(max_steps=10, max_epochs=None).plan(Planned(), stream(), ones(1))
    assert (plan.steps, plan.is_complete, plan.due, plan.samples) == (10, False, {}, None)
    assert str(plan).startswith("Run         10 steps\n")
    assert [text for text in plan.warnings if "length" in text] == plan.warnings


class TestCarried:
    """A window that is left open at an epoch's end has no step yet."""

    def test_one_record_and_one_validation_a_step(self) -> None:
        memory, watch = MemoryTracker(), Watch()
        found = trainer(
            max_epochs=2, accumulate=2, accumulate_across_epochs="carry", log_every="0.5 epoch",
            val_every=["first", "0.5 epoch", "last"], callbacks=watch, trackers=memory,
        )  # fmt: skip
        plan = found.plan(Planned(), loader(20), ones(1))
        found.fit(Planned(), loader(20), ones(1))
        steps = [step for step, metrics in memory.runs[0].records if "train/loss" in metrics]
        # Batches 0 1 | 2 3 | 4 and 0 | 1 2 | 3 4: the half and the end of the first epoch are due at steps 2 and 3.
        assert plan.due["log"] == steps == [2, 3, 4, 5]
        assert plan.due["validation"] == watch.validated == [1, 2, 4, 5]


def test_everything_is_dropped() -> None:
    found = trainer(accumulate=8, accumulate_across_epochs="drop")
    with pytest.raises(DataError, match="'drop' leaves them all out"):
        found.plan(Scalar(), ones(5))


@pytest.mark.parametrize("limit", ["30 min", "1M tokens"])
def test_what_cannot_be_foreseen_is_said(limit: str) -> None:
    name = "max_time" if "min" in limit else "max_steps"
    plan = trainer(max_epochs=1, **{name: limit}).plan(Scalar(), ones(3))
    assert not plan.is_complete
    assert any("can't be foreseen in steps" in text for text in plan.warnings)
