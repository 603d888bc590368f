"""Pains 4, 5 and 6: what counts as a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, StepLR

from loopwright.strategies.outcome import StepOutcome
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from ..trainer.tiny import Scheduled, Watch, batches, fit, ones


def test_pain_04_a_schedule_every_4_optimizer_steps() -> None:
    rates: list[float] = []
    task = Scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step", frequency=4)
    keep = Watch(before_step=lambda trainer, task, optimizer: rates.append(optimizer.param_groups[0]["lr"]))
    found = fit(task, ones(12), accumulate=2, callbacks=keep)
    assert found.state.step == 6
    assert task.scheduler.last_epoch == 1
    assert rates == [1, 1, 1, 1, 0.5, 0.5]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_pain_04_a_warm_up_of_10_ends_at_step_10(accumulate: int) -> None:
    rates: list[float] = []
    task = Scheduled(lambda optimizer: LinearLR(optimizer, 0.1, 1.0, total_iters=10), interval="step")
    keep = Watch(step=lambda trainer, task, outcome: rates.append(optimizer_rate(trainer)))
    fit(task, ones(12 * accumulate), accumulate=accumulate, callbacks=keep)
    # `on_step` fires before the schedule moves: these are the rates that the steps were made with.
    assert rates[9] < 1
    assert rates[10] == rates[11] == pytest.approx(1)


def optimizer_rate(trainer: Any) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def test_pain_05_steps_that_the_scaler_skips_do_not_count() -> None:
    outcomes: list[StepOutcome] = []
    task = Scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step")
    precision = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0))
    inf = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that is stepped before its optimizer
        found = fit(
            task, batches(inf, inf, 1, 1), precision=precision,
            callbacks=Watch(step=lambda trainer, task, outcome: outcomes.append(outcome)),
        )  # fmt: skip
    assert outcomes == [StepOutcome.SKIPPED, StepOutcome.SKIPPED, StepOutcome.APPLIED, StepOutcome.APPLIED]
    assert (found.state.skipped_steps, found.state.step) == (2, 2)
    assert task.rate == 0.25
    assert task.value == -1.5


class Two(Task):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.steps = [0, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for index, (weight, optimizer) in enumerate(zip((self.a, self.b), self.optimizers(), strict=True)):
            self.manual_backward((weight * batch).mean())
            optimizer.step()
            self.steps[index] += optimizer.outcome is StepOutcome.APPLIED
            optimizer.zero_grad()
        self.log("a", self.a)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([weight], lr=1.0) for weight in (self.a, self.b)]


def test_pain_06_two_optimizers_make_one_step() -> None:
    memory = MemoryTracker()
    task = Two()
    found = fit(task, ones(4), trackers=memory, log_every=1)
    assert found.state.step == 4
    assert task.steps == [4, 4]
    assert memory.runs[0].series("a") == [(1, -1), (2, -2), (3, -3), (4, -4)]


def test_pain_06_max_steps_counts_them_too() -> None:
    found = fit(Two(), ones(10), max_steps=4)
    assert (found.state.step, found.state.micro_step) == (4, 4)
