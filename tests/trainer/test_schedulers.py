"""Optimizers and schedules: what `configure_optimizers` may return, and when a schedule steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau, StepLR

from loopwright.distributed.errors import MetricError, TaskError
from loopwright.trainer.task import Task

from .tiny import Scalar, Scheduled, Watch, batches, fit, ones


def halve(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def rates(task: Scheduled, data: Any, *args: Any, **options: Any) -> list[float]:
    """The learning rate that each optimizer step was made with."""
    seen: list[float] = []
    watch = Watch(before_step=lambda trainer, task, optimizer: seen.append(optimizer.param_groups[0]["lr"]))
    fit(task, data, *args, callbacks=watch, **options)
    return seen


class TestWhen:
    def test_by_epoch_is_the_default(self) -> None:
        task = Scheduled(halve)
        assert rates(task, ones(3), max_epochs=3) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
        assert task.rate == 0.125

    def test_by_step(self) -> None:
        task = Scheduled(halve, interval="step")
        assert rates(task, ones(4)) == [1, 0.5, 0.25, 0.125]
        assert task.rate == 0.0625

    def test_by_step_counts_optimizer_steps_whatever_the_accumulation(self) -> None:
        task = Scheduled(halve, interval="step")
        assert rates(task, ones(8), accumulate=2) == [1, 0.5, 0.25, 0.125]

    def test_frequency_in_steps(self) -> None:
        task = Scheduled(halve, interval="step", frequency=3)
        assert rates(task, ones(4), max_epochs=2) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]

    def test_frequency_in_epochs(self) -> None:
        task = Scheduled(halve, frequency=2)
        assert rates(task, ones(1), max_epochs=5) == [1, 1, 0.5, 0.5, 0.25]

    def test_an_epoch_that_was_cut_is_none(self) -> None:
        task = Scheduled(halve)
        assert rates(task, ones(3), max_steps=4) == [1, 1, 1, 0.5]
        assert task.rate == 0.5

    def test_not_in_a_skipped_step(self) -> None:
        class Some(Scheduled):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return None if batch.item() == 0 else super().training_step(batch, batch_idx)

        task = Some(halve, interval="step")
        assert rates(task, batches(1, 0, 0, 1)) == [1, 0.5]

    def test_warm_up(self) -> None:
        # From 0.1 to 1 in ten steps, as torch has it: 0.1 + 0.09 * k.
        task = Scheduled(lambda optimizer: LinearLR(optimizer, 0.1, 1.0, total_iters=10), interval="step")
        expected = [0.1 + 0.09 * k for k in range(11)] + [1.0]
        assert rates(task, ones(24), accumulate=2) == pytest.approx(expected)

    def test_validation_sees_the_rate_after_the_step(self) -> None:
        seen: list[float] = []
        task = Scheduled(halve, interval="step")
        fit(task, ones(4), ones(1), val_every=2, callbacks=Watch(validation_start=lambda *_: seen.append(task.rate)))
        assert seen == [0.25, 0.0625]

    def test_an_own_schedule(self) -> None:
        class Mine:
            def __init__(self, optimizer: torch.optim.Optimizer) -> None:
                self.steps = 0

            def step(self) -> None:
                self.steps += 1

        task = Scheduled(Mine, interval="step")
        fit(task, ones(4))
        assert task.scheduler.steps == 4

    def test_several(self) -> None:
        class Two(Scalar):
            def configure_optimizers(self) -> Any:
                self.optimizer = SGD(self.parameters(), lr=1.0)
                first = LambdaLR(self.optimizer, lambda step: 1.0)
                self.counts = first, LambdaLR(self.optimizer, lambda step: 1.0)
                return [self.optimizer], [{"scheduler": first, "interval": "step"}, self.counts[1]]

        task = Two()
        fit(task, ones(3), max_epochs=2)
        assert [scheduler.last_epoch for scheduler in task.counts] == [6, 2]


class Plateau(Scheduled):
    """Validation gives the values of its list, one after another."""

    def __init__(self, values: list[float], **options: Any) -> None:
        super().__init__(lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0), **options)
        self.values = iter(values)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", next(self.values))


class TestPlateau:
    def test_by_epoch(self) -> None:
        task = Plateau([3, 3, 2, 2, 2], monitor="val/loss")
        # 3 is new; 3 is no better: 0.5; 2 is; 2 no better: 0.25; again: 0.125.
        assert rates(task, ones(1), ones(1), max_epochs=5) == [1, 1, 0.5, 0.5, 0.25]
        assert task.rate == 0.125

    def test_only_new_values_count(self) -> None:
        # Validation every second epoch, the schedule each: a value is shown to it once.
        task = Plateau([3, 2, 1], monitor="val/loss")
        rates(task, ones(1), ones(1), max_epochs=6, val_every="2 epochs")
        assert task.rate == 1

    def test_a_metric_of_training(self) -> None:
        class Training(Plateau):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.log("loss", 1.0, on_epoch=True, on_step=False)
                return super().training_step(batch, batch_idx)

        task = Training([], monitor="loss")
        assert rates(task, ones(1), max_epochs=3) == [1, 1, 0.5]

    @pytest.mark.filterwarnings("ignore:validation never ran")
    def test_the_run_ends_before_validation(self) -> None:
        task = Plateau([3], monitor="val/loss")
        assert rates(task, ones(3), ones(1), max_steps=1) == [1]
        assert task.rate == 1

    def test_a_metric_that_is_never_logged(self) -> None:
        seen: list[Any] = []
        task = Plateau([3], monitor="val/los")
        watch = Watch(epoch_end=lambda trainer, task, metrics: seen.append(metrics))
        with pytest.raises(MetricError, match=r"monitor='val/los' was never logged. Did you mean 'val/loss'"):
            fit(task, ones(1), ones(1), callbacks=watch)
        assert seen == [{"val/loss": 3, "epoch": 1}]  # an epoch that begins ends

    def test_without_validation_it_is_known_at_once(self) -> None:
        with pytest.raises(MetricError, match=r"monitor='val/loss' was never logged"):
            fit(Plateau([], monitor="val/loss"), ones(1))

    def test_a_plateau_needs_a_monitor(self) -> None:
        with pytest.raises(TaskError, match=r"ReduceLROnPlateau needs the metric it watches: return"):
            fit(Plateau([3]), ones(1), ones(1))


class Returns(Scalar):
    """`configure_optimizers` returns what a function makes of an optimizer."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(SGD(self.parameters(), lr=1.0))


FORMS: dict[str, Any] = {
    "optimizer": lambda o: o,
    "list of one": lambda o: [o],
    "pair": lambda o: (o, halve(o)),
    "pair with options": lambda o: (o, {"scheduler": halve(o)}),
    "two lists": lambda o: ([o], [halve(o)]),
    "two lists with options": lambda o: ([o], [{"scheduler": halve(o), "interval": "epoch", "frequency": 1}]),
    "two lists without a scheduler": lambda o: ([o], []),
    "mapping": lambda o: {"optimizer": o},
    "mapping with none": lambda o: {"optimizer": o, "lr_scheduler": None},
    "mapping with scheduler": lambda o: {"optimizer": o, "lr_scheduler": halve(o)},
    "mapping with options": lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "frequency": 1}},
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS.keys())
def test_what_may_be_returned(make: Any) -> None:
    task = Returns(make)
    found = fit(task, ones(2), max_epochs=2)
    has_scheduler = bool(found.schedulers)
    assert task.value == (-3 if has_scheduler else -4)  # -1 -1, then at half the rate
    assert len(found.optimizers) == 1


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda o: None, r"returned 0 optimizers; automatic optimization steps exactly one"),
    "two": (
        lambda o: [o, o],
        r"returned 2 optimizers; automatic optimization steps exactly one.*automatic_optimization =",
    ),
    "a number": (lambda o: 3, r"Returns.configure_optimizers returned a int. Expected a torch optimizer, a pair"),
    "a word": (lambda o: "sgd", r"returned a str. Expected a torch optimizer"),
    "a misspelt key": (lambda o: {"optimiser": o}, r"a mapping with \['optimiser'\]. Did you mean 'optimizer'"),
    "another key": (
        lambda o: {"optimizer": o, "scheduler": halve(o)},
        r"a mapping with \['optimizer', 'scheduler'\].*Accepted: lr_scheduler, optimizer",
    ),
    "no optimizer": (lambda o: {"lr_scheduler": halve(o)}, r"a mapping with \['lr_scheduler'\]"),
    "a wrong optimizer": (lambda o: {"optimizer": 3}, r"returned a int. Expected a torch optimizer"),
    "no step": (lambda o: {"optimizer": o, "lr_scheduler": 3}, r"lr_scheduler=3 has no step\(\)"),
    "no scheduler": (
        lambda o: {"optimizer": o, "lr_scheduler": {"interval": "step"}},
        r"lr_scheduler is a mapping without 'scheduler'",
    ),
    "an unknown option": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "intervall": "step"}},
        r"lr_scheduler has an unknown key 'intervall'. Did you mean 'interval'",
    ),
    "an unknown interval": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "interval": "steps"}},
        r"lr_scheduler interval='steps'. Did you mean 'step'",
    ),
    "a frequency of 0": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "frequency": 0}},
        r"lr_scheduler frequency=0. Expected an integer >= 1",
    ),
    "a frequency in parts": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "frequency": 0.5}},
        r"lr_scheduler frequency=0.5. Expected an integer >= 1",
    ),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_may_not_be_returned(make: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        fit(Returns(make), ones(1))


def test_parameters_of_something_else() -> None:
    other = nn.Linear(3, 2)

    class Foreign(Scalar):
        def configure_optimizers(self) -> Any:
            return SGD([*self.parameters(), *other.parameters()], lr=1.0)

    with pytest.raises(TaskError, match=r"SGD group 0 holds 2 parameters that are not the task's.*\(2, 3\)"):
        fit(Foreign(), ones(1))


@pytest.mark.filterwarnings("ignore:no optimizer stepped in the first epoch")
def test_an_optimizer_that_needs_a_closure() -> None:
    class Closes(Scalar):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TaskError, match=r"LBFGS.step needs a closure .*automatic_optimization = False"):
        fit(Closes(), ones(1))

    class Manual(Closes):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            def closure() -> Tensor:
                self.zero_grad()
                loss = (self.w - 3).square()
                loss.backward()
                return loss

            self.trainer.optimizers[0].step(closure)

    task = Manual()
    fit(task, ones(3))
    assert task.value == pytest.approx(3, abs=1e-4)


def test_the_same_optimizer_in_every_fit() -> None:
    class Keeps(Scalar):
        def __init__(self) -> None:
            super().__init__(momentum=0.5)
            self.optimizer = super().configure_optimizers()

        def configure_optimizers(self) -> Any:
            return self.optimizer

    task = Keeps()
    for _ in range(2):
        fit(task, ones(1))
    assert task.value == -1 - 1.5  # the momentum of the first run goes on


def test_groups_with_rates_of_their_own() -> None:
    class Groups(Task):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.a + self.b) * batch.mean()

        def configure_optimizers(self) -> Any:
            optimizer = SGD([{"params": [self.a]}, {"params": [self.b], "lr": 0.5}], lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halve(optimizer), "interval": "step"}}

    task = Groups()
    fit(task, ones(2))
    assert (task.a.item(), task.b.item()) == (-1.5, -0.75)


def test_frozen_parameters_may_be_left_out() -> None:
    class Frozen(Task):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
            self.body.requires_grad_(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(self.body(batch)).mean()

        def configure_optimizers(self) -> Any:
            return Adam(p for p in self.parameters() if p.requires_grad)

    task = Frozen()
    before = {name: p.clone() for name, p in task.named_parameters()}
    fit(task, [torch.ones(2, 1)], clip_norm=1.0)
    moved = {name for name, p in task.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}
