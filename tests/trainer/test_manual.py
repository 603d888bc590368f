"""Manual optimization: the task steps its optimizers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.outcome import StepOutcome
from loopwright.trainer.task import Task

from .tiny import Recorder, Watch, batches, fit, ones, tracked, trainer


class Two(Task):
    """Two weights with an optimizer each; a batch's gradient goes to both, or to those that a function names."""

    automatic_optimization = False

    def __init__(self, which: Any = lambda index: "ab") -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.which = which

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for name, weight, optimizer in (("a", self.a, first), ("b", self.b, second)):
            if name in self.which(batch_idx):
                self.manual_backward((weight * batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                self.log(name, weight)

    def configure_optimizers(self) -> Any:
        return [SGD([self.a], lr=1.0), SGD([self.b], lr=0.5)]

    @property
    def values(self) -> tuple[float, float]:
        return self.a.item(), self.b.item()


def test_two_optimizers_count_as_one_step() -> None:
    task = Two()
    found = fit(task, ones(4))
    assert task.values == (-4, -2)
    assert (found.state.step, found.state.micro_step, found.state.skipped_steps) == (4, 4, 0)
    assert len(found.optimizers) == 2


def test_max_steps_counts_steps_of_the_loop() -> None:
    found = fit(Two(), ones(10), max_steps=4)
    assert (found.state.step, found.state.micro_step) == (4, 4)


def test_records_are_at_steps_of_the_loop() -> None:
    records = tracked(Two(), ones(4), log_every=1)
    assert [step for step, _ in records] == [1, 2, 3, 4]
    assert [metrics["a"] for _, metrics in records] == [-1, -2, -3, -4]


def test_turns_of_their_own() -> None:
    # a in each batch, b in every third; batch 3 has none at all.
    task = Two(lambda index: "" if index == 3 else "ab" if index % 3 == 0 else "a")
    found = fit(task, ones(7))
    assert task.values == (-6, -1)  # b at batches 0 and 6
    assert found.state.step == 6


def test_accumulation_by_hand() -> None:
    class Own(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, _ = self.optimizers()
            self.manual_backward((self.a * batch).mean() / 2)
            if batch_idx % 2:
                first.step()
                first.zero_grad()

    task = Own()
    found = fit(task, batches(1, 3, 5, 9))
    assert task.values == (-2 - 7, 0)
    assert (found.state.step, found.state.micro_step) == (2, 4)


def test_one_optimizer_comes_alone() -> None:
    class One(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward((self.a * batch).mean())
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=1.0)

    task = One()
    assert fit(task, ones(3)).state.step == 3
    assert task.values == (-3, 0)


def test_torch_optimizers_of_its_own_are_not_seen() -> None:
    """A step that goes past the gate is the task's own business: no step is counted."""

    class Past(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            (self.a * batch).mean().backward()
            torch_optimizer = self.trainer.optimizers[0]
            torch_optimizer.step()
            torch_optimizer.zero_grad()

    task = Past()
    with pytest.warns(UserWarning, match=r"no optimizer stepped in the first epoch. Past has automatic_optimization"):
        found = fit(task, ones(3))
    assert (task.a.item(), found.state.step) == (-3, 0)


class TestEvents:
    def test_their_order(self) -> None:
        recorder = Recorder()
        fit(Two(), ones(1), callbacks=recorder)
        one = ["before_backward", "backward", "before_step"]
        assert recorder.log == [
            "setup", "fit_start", "epoch_start",
            "batch_start", *one, *one, "step", "batch_end",
            "epoch_end", "stop", "log", "fit_end", "teardown",
        ]  # fmt: skip

    def test_gradients_are_there_before_the_step(self) -> None:
        seen: list[tuple[str, float]] = []

        class Looks(Callback):
            def on_before_step(self, trainer: Any, task: Any, optimizer: torch.optim.Optimizer) -> None:
                name = "a" if optimizer is trainer.optimizers[0] else "b"
                seen.append((name, optimizer.param_groups[0]["params"][0].grad.item()))

        fit(Two(), batches(3), callbacks=Looks())
        assert seen == [("a", 3), ("b", 3)]

    def test_outputs_are_those_of_the_step(self) -> None:
        class Returns(Two):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                super().training_step(batch, batch_idx)
                return {"anything": batch_idx}

        seen: list[Any] = []
        fit(Returns(), ones(2), callbacks=Watch(batch_end=lambda trainer, task, outputs: seen.append(outputs)))
        assert seen == [{"anything": 0}, {"anything": 1}]

    def test_a_batch_is_skipped(self) -> None:
        def skip(trainer: Any, task: Any, batch: Any, index: int) -> None:
            if index == 1:
                raise SkipBatch

        task = Two()
        found = fit(task, ones(3), callbacks=Watch(batch_start=skip))
        assert (task.values, found.state.step, found.state.skipped_steps) == ((-2, -1), 2, 0)

    @pytest.mark.parametrize("precision", ["no", "fp16"])
    def test_one_step_of_a_batch_is_dropped(self, precision: str) -> None:
        class Drops(Callback):
            def on_before_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
                if optimizer is trainer.optimizers[0] and trainer.state.micro_step != 1:
                    raise SkipBatch

        task, recorder = Two(), Recorder()
        found = fit(task, batches(1, 2, 4), precision=precision, callbacks=[Drops(), recorder])
        # a steps in the second batch alone, b in all: each batch has a step.
        assert task.values == (-2, -3.5)
        assert (found.state.step, found.state.skipped_steps) == (3, 0)

    def test_all_steps_of_a_batch_are_dropped(self) -> None:
        def drop(trainer: Any, task: Any, optimizer: Any) -> None:
            if trainer.state.micro_step == 1:
                raise SkipBatch

        task = Two()
        found = fit(task, batches(1, 2, 4), callbacks=Watch(before_step=drop))
        assert task.values == (-5, -2.5)
        assert (found.state.step, found.state.skipped_steps) == (2, 1)


def test_a_small_gan_equals_a_bare_loop() -> None:
    class GAN(Task):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
            self.judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def losses(self, real: Tensor, noise: Tensor) -> tuple[Any, Any]:
            def judge() -> Tensor:
                fake = self.maker(noise).detach()
                return F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()

            return judge, lambda: F.softplus(-self.judge(self.maker(noise))).mean()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            makes, judges = self.optimizers()
            judge, make = self.losses(*batch)
            for loss, optimizer in ((judge, judges), (make, makes)):
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
            makes.zero_grad()
            judges.zero_grad()

        def configure_optimizers(self) -> Any:
            return Adam(self.maker.parameters(), lr=0.01), Adam(self.judge.parameters(), lr=0.02)

    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(5)]
    task, bare = GAN(), GAN()
    bare.load_state_dict(task.state_dict())
    found = fit(task, data, max_epochs=2)
    assert found.state.step == 10

    makes, judges = bare.configure_optimizers()
    for batch in data * 2:
        judge, make = bare.losses(*batch)
        for loss, optimizer in ((judge, judges), (make, makes)):
            makes.zero_grad()
            judges.zero_grad()
            loss().backward()
            optimizer.step()
    # The judge's gradients of the maker's turn were dropped by its own zero_grad at its next turn.
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), bare.parameters(), strict=True))


class TestSchedulers:
    def test_they_are_the_tasks_own(self) -> None:
        class Rates(Two):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                super().training_step(batch, batch_idx)
                first, second = self.lr_schedulers()
                first.step()
                if batch_idx % 2:
                    second.step()

            def configure_optimizers(self) -> Any:
                optimizers = super().configure_optimizers()
                return optimizers, [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]

        task = Rates()
        found = fit(task, ones(4), max_epochs=1)
        assert [optimizer.param_groups[0]["lr"] for optimizer in found.optimizers] == [1 / 16, 0.5 / 4]
        assert task.a.item() == -(1 + 1 / 2 + 1 / 4 + 1 / 8)

    @pytest.mark.filterwarnings("ignore:no optimizer stepped in the first epoch")
    def test_none_and_one(self) -> None:
        seen: list[Any] = []

        class Asks(Two):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                seen.append(self.lr_schedulers())

        class One(Asks):
            def configure_optimizers(self) -> Any:
                self.only = StepLR(optimizer := SGD(self.parameters(), lr=1.0), 1)
                return [optimizer], [self.only]

        fit(Asks(), ones(1))
        fit(task := One(), ones(1))
        assert seen == [None, task.only]


class TestPrecision:
    class Half(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            assert torch.is_autocast_enabled("cpu")
            super().training_step(batch, batch_idx)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_in_half_precision(self, precision: str) -> None:
        task = self.Half()
        found = fit(task, batches(1, 2, 4), precision=precision)
        assert task.values == (-7, -3.5)
        assert found.state.step == 3

    def test_an_overflow_is_a_skipped_step(self) -> None:
        class Looks(Callback):
            def __init__(self) -> None:
                self.outcomes: list[StepOutcome] = []
                self.gradients: list[float] = []

            def on_step(self, trainer: Any, task: Any, outcome: StepOutcome) -> None:
                self.outcomes.append(outcome)

            def on_before_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
                self.gradients.append(optimizer.param_groups[0]["params"][0].grad.item())

        seen, task = Looks(), self.Half(lambda index: "a")
        found = fit(task, batches(1, float("inf"), 4), precision="fp16", callbacks=seen)
        assert task.values == (-5, 0)
        assert (found.state.step, found.state.skipped_steps) == (2, 1)
        assert seen.outcomes == [StepOutcome.APPLIED, StepOutcome.SKIPPED, StepOutcome.APPLIED]
        assert seen.gradients == [1, 4]  # a step that will not be applied is not announced

    def test_clipping_of_its_own_sees_unscaled_gradients(self) -> None:
        class Clips(Two):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                first, _ = self.optimizers()
                self.manual_backward((self.a * batch).mean())
                first.step()
                first.zero_grad()

        task = Clips()
        watch = Watch(
            before_step=lambda trainer, task, optimizer: nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 0.5
            )
        )
        fit(task, batches(8, -4), precision="fp16", callbacks=watch)
        assert task.a.item() == pytest.approx(0, abs=1e-5)
        fit(task, batches(8), precision="fp16", callbacks=watch)
        assert task.a.item() == pytest.approx(-0.5)

    def test_clipping_by_the_accelerator_unscales_first(self) -> None:
        norms: list[float] = []

        class Clips(Two):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                first, _ = self.optimizers()
                self.manual_backward((self.a * batch).mean())
                norms.append(self.trainer.accelerator.clip_grad_norm_([self.a], 0.5).item())
                first.step()
                first.zero_grad()

        task = Clips()
        fit(task, batches(8), precision="fp16")
        assert norms == [8]
        assert task.a.item() == pytest.approx(-0.5)


@pytest.mark.parametrize(("option", "value"), [("accumulate", 2), ("clip_norm", 1.0), ("clip_value", 1.0)])
def test_settings_that_would_have_no_effect(option: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{option}={value} has no effect in manual optimization. Do it in training_step"
    ):
        fit(Two(), ones(4), **{option: value})


def test_a_closure_is_refused() -> None:
    class Closes(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.optimizers()[0].step(lambda: self.a)

    with pytest.raises(ConfigError, match=r"optimizer.step\(closure\) can't be used in a Task"):
        fit(Closes(), ones(1))


def test_validation_and_epochs_are_as_ever() -> None:
    class Validates(Two):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val", self.a)

    records = tracked(Validates(), ones(2), ones(1), max_epochs=2, log_every="never")
    assert records == [(2, {"val": -2, "epoch": 1}), (4, {"val": -4, "epoch": 2})]


def test_it_needs_a_trainer() -> None:
    task = Two()
    with pytest.raises(TypeError, match=r"Two.trainer: no trainer runs this task now"):
        task.manual_backward(task.a * 1)
    with pytest.raises(ConfigError, match=r"trainer.manual_backward outside of fit"):
        trainer().manual_backward(task.a * 1)


@pytest.mark.filterwarnings("ignore:no optimizer stepped in the first epoch")
def test_optimizers_that_nobody_counts_do_not_stop_validation() -> None:
    class Own(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            with torch.no_grad():
                self.a -= batch.mean()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("a", self.a)

    seen: list[float] = []
    watch = Watch(validation_end=lambda trainer, task, metrics: seen.append(metrics["a"]))
    fit(Own(), ones(2), ones(1), max_epochs=3, val_every=["1 epoch", "last"], callbacks=watch)
    assert seen == [-2, -4, -6]
