"""Number formats in the Trainer: autocast, the scaler, skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import ConfigError, NonFiniteError
from loopwright.strategies.outcome import StepOutcome
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trainer.task import Task

from .tiny import Pair, Recorder, Scalar, Scheduled, Watch, batches, fit, ones, trainer

CPU = torch.device("cpu")
INF = float("inf")
APPLIED, SKIPPED = StepOutcome.APPLIED, StepOutcome.SKIPPED


def scaled(init_scale: float = 1024.0, **options: Any) -> ScaledPrecision:
    return ScaledPrecision(CPU, torch.amp.GradScaler("cpu", init_scale=init_scale, **options))


class Looks(Task):
    """Writes down the number formats that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def step(self, batch: Tensor, *_: Any) -> Tensor:
        outputs = self.net(batch)
        self.seen.append(outputs.dtype)
        return outputs.float().mean()

    training_step = validation_step = test_step = predict_step = step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16),
        ("32", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16),
    ],
)  # fmt: skip
def test_every_stage_computes_in_it_and_weights_stay(precision: str, dtype: torch.dtype) -> None:
    task, data = Looks(), [torch.ones(3, 2)]
    found = trainer(precision=precision, sanity_val_batches=1)
    found.fit(task, data, data)
    found.validate(task, data)
    found.test(task, data)
    found.predict(task, data)
    assert task.seen == [dtype] * 6
    assert task.net.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_backward_and_the_step_are_outside_of_autocast() -> None:
    seen: list[bool] = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradients[0]

    class Task(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return Backward.apply(super().training_step(batch, batch_idx))

    watch = Watch(before_step=lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    fit(Task(), ones(1), precision="bf16", callbacks=watch)
    assert seen == [False, False]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fp16_gives_the_numbers_of_full_precision(accumulate: int) -> None:
    plain, half = Scalar(), Scalar()
    fit(plain, batches(1, 2, 3, 6, 10), accumulate=accumulate)
    fit(half, batches(1, 2, 3, 6, 10), accumulate=accumulate, precision=scaled(64))
    assert half.value == plain.value


class TestOverflow:
    def run(self, data: list[Tensor], task: Scalar | None = None, **options: Any) -> tuple[Any, Any, list[Any]]:
        task = task or Scalar()
        outcomes: list[StepOutcome] = []
        watch = Watch(step=lambda trainer, task, outcome: outcomes.append(outcome))
        precision = options.pop("precision", None) or scaled()
        found = fit(task, data, precision=precision, callbacks=watch, **options)
        return task, found, outcomes

    def test_the_step_is_skipped(self) -> None:
        task, found, outcomes = self.run(batches(INF, 1, INF, 2))
        assert task.value == -3
        assert outcomes == [SKIPPED, APPLIED, SKIPPED, APPLIED]
        assert (found.state.step, found.state.skipped_steps, found.state.micro_step) == (2, 2, 4)
        assert found.strategy.precision.scaler.get_scale() == 1024 / 4

    def test_schedules_wait(self) -> None:
        task = Scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step")
        self.run(batches(INF, INF, 1, 1), task)
        assert task.rate == 0.25
        assert task.value == -1.5

    def test_anywhere_in_a_window(self) -> None:
        task, _, outcomes = self.run(batches(1, INF, 2, 4, INF, 1), accumulate=2)
        assert task.value == -3
        assert outcomes == [SKIPPED, APPLIED, SKIPPED]

    def test_it_is_not_announced(self) -> None:
        recorder = Recorder()
        fit(Scalar(), batches(INF, 1), precision=scaled(), callbacks=recorder)
        assert (recorder.count("before_step"), recorder.count("step")) == (1, 2)

    def test_the_scale_grows(self) -> None:
        precision = scaled(growth_interval=3)
        self.run(batches(1, 1, 1, 1, 1, 1, 1), precision=precision)
        assert precision.scaler.get_scale() == 4096

    def test_without_end_is_an_error(self) -> None:
        with pytest.raises(NonFiniteError, match="the loss scale of fp16 has fallen to almost 0"):
            self.run(batches(*[INF] * 60))

    def test_a_skipped_window_without_a_loss_does_not_disturb_the_scaler(self) -> None:
        class Some(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return None if batch.item() == 0 else super().training_step(batch, batch_idx)

        task, found, outcomes = self.run(batches(1, 0, INF, 0, 2), Some())
        assert task.value == -3
        assert outcomes == [APPLIED, SKIPPED, SKIPPED, SKIPPED, APPLIED]
        assert found.strategy.precision.scaler.get_scale() == 512


class TestFused:
    class Net(Task):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.fused = fused

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).sum()

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)
            self.schedule = StepLR(self.optimizer, 1, gamma=0.5)
            return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_skipped_step_is_seen(self, fused: bool) -> None:
        task = self.Net(fused)
        precision = scaled(65536)
        found = fit(task, [torch.tensor([INF, 1.0])], precision=precision)
        assert (found.state.step, found.state.skipped_steps) == (0, 1)
        assert task.w.tolist() == [1, 1]
        assert task.optimizer.param_groups[0]["lr"] == 0.1
        assert precision.scaler.get_scale() == 32768

    def test_both_train_alike(self) -> None:
        tasks = [self.Net(False), self.Net(True)]
        for task in tasks:
            fit(
                task,
                [torch.tensor([1.0, 2.0]), torch.tensor([INF, 1.0]), torch.tensor([3.0, -1.0])],
                precision=scaled(),
            )
        torch.testing.assert_close(tasks[0].w, tasks[1].w)


def test_clipping_sees_unscaled_gradients() -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        def on_before_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            self.seen.append(task.w.grad.tolist())

    task, norms = Pair(), Norms()
    fit(task, [torch.tensor([3.0, 4.0])], precision=scaled(), clip_norm=1.0, callbacks=norms)
    assert task.w.tolist() == pytest.approx([-0.6, -0.8])
    assert norms.seen == [pytest.approx([0.6, 0.8])]


def test_an_unknown_word() -> None:
    with pytest.raises(ConfigError, match=r"precision='bf61' is unknown. Did you mean 'bf16'"):
        trainer(precision="bf61")
