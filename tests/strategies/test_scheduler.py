"""`GatedScheduler`. F: facts of semantics about Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright.strategies.gradient_state import GradientAccumulationPlugin, GradientState
from loopwright.strategies.optimizer import GatedOptimizer
from loopwright.strategies.outcome import StepOutcome
from loopwright.strategies.scheduler import GatedScheduler
from loopwright.trainer.accelerator import Accelerator

TENSOR = {"lr": lambda: torch.tensor(1.0), "capturable": False}


def prepared(accelerator: Accelerator, **options: Any) -> tuple[GatedOptimizer, GatedScheduler]:
    """An optimizer with the learning rate 1, and its scheduler, by which it falls by 0.1 at each of its steps."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 - step / 10)
    return optimizer, GatedScheduler(schedule, [optimizer], accelerator.gradient_state, **options)


def rates(accelerator: Accelerator, optimizer: GatedOptimizer, scheduler: GatedScheduler, calls: int) -> list[float]:
    """The learning rate after each of some micro-batches."""
    seen = []
    for _ in range(calls):
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
        seen.append(round(scheduler.get_last_lr()[0], 6))
    return seen


@pytest.mark.parametrize(("steps_per_call", "expected"), [(2, [0.8, 0.6, 0.4]), (1, [0.9, 0.8, 0.7])])
def test_f21_a_schedule_advances_by_the_processes_or_by_one(steps_per_call: int, expected: list[float]) -> None:
    accelerator = Accelerator()
    optimizer, scheduler = prepared(accelerator, steps_per_call=steps_per_call)
    assert rates(accelerator, optimizer, scheduler, 3) == expected


def test_f21_a_schedule_waits_for_the_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer, scheduler = prepared(accelerator, steps_per_call=2)
    assert rates(accelerator, optimizer, scheduler, 4) == [1.0, 0.8, 0.8, 0.6]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # which is what is wanted here
def test_f21_a_schedule_that_does_not_wait() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer, scheduler = prepared(accelerator, steps_per_call=2, step_with_optimizer=False)
    assert rates(accelerator, optimizer, scheduler, 3) == [0.9, 0.8, 0.7]


def test_f22_a_schedule_with_an_end_stops_there() -> None:
    accelerator = Accelerator()
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=4)
    scheduler = GatedScheduler(schedule, [optimizer], accelerator.gradient_state, steps_per_call=2)
    # From 1/25 up to 1 and down to 1/250000 in its 4 steps, by w = 2 of them at a time; B89: there it stays.
    expected = [0.283061, 4e-6, 4e-6, 4e-6, 4e-6]
    assert rates(accelerator, optimizer, scheduler, 5) == pytest.approx(expected)
    assert schedule.last_epoch == 4


@pytest.mark.parametrize(("optimizer_class", "options"), [("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adam", TENSOR)])
def test_b89_a_finished_cycle_keeps_its_last_values(optimizer_class: str, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    accelerator = Accelerator()
    optimizer = accelerator.prepare(getattr(torch.optim, optimizer_class)([parameter], **{"lr": 1.0} | options))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=5)
    scheduler = GatedScheduler(schedule, [optimizer], accelerator.gradient_state)
    group = optimizer.optimizer.param_groups[0]
    seen = []
    for _ in range(7):
        optimizer.step()
        scheduler.step()
        momentum = group["momentum"] if "momentum" in group else group["betas"][0]
        seen.append((schedule.last_epoch, float(group["lr"]), round(momentum, 6), float(scheduler.get_last_lr()[0])))
    # Its last planned step is the fourth; torch's own formula gives 0.25 for the fifth, on its way up.
    assert [epoch for epoch, *_ in seen] == [1, 2, 3, 4, 5, 5, 5]
    assert [last for *_, last in seen[3:]] == pytest.approx([4e-6] * 4)
    assert [rate for _, rate, *_ in seen[3:]] == pytest.approx([4e-6] * 4)
    assert [momentum for _, _, momentum, _ in seen[3:]] == [0.95] * 4


def test_another_schedule_with_an_end_sets_its_own_last_value() -> None:
    class Falling(torch.optim.lr_scheduler.LambdaLR):
        total_steps = 2

    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    accelerator = Accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    schedule = Falling(optimizer.optimizer, lambda step: 1 - step / 2)
    scheduler = GatedScheduler(schedule, [optimizer], accelerator.gradient_state)
    assert rates(accelerator, optimizer, scheduler, 4) == [0.5, 0.0, 0.0, 0.0]


def test_f23_a_dropped_step_does_not_move_the_schedule() -> None:
    accelerator = Accelerator()
    optimizer, scheduler = prepared(accelerator, steps_per_call=2)
    seen = []
    for outcome in (StepOutcome.APPLIED, StepOutcome.SKIPPED, StepOutcome.APPLIED, StepOutcome.APPLIED):
        optimizer.step()
        optimizer.outcome = outcome
        scheduler.step()
        seen.append(round(scheduler.get_last_lr()[0], 6))
    assert seen == [0.8, 0.8, 0.6, 0.4]


def test_f20_a_schedule_planned_in_micro_batches_is_adjusted() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    optimizer, scheduler = prepared(accelerator)
    assert rates(accelerator, optimizer, scheduler, 6) == [1.0, 1.0, 0.7, 0.7, 0.7, 0.4]


def test_the_micro_batches_of_a_dropped_step_are_not_made_up_for() -> None:
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(2, adjust_scheduler=True))
    optimizer, scheduler = prepared(accelerator)
    with accelerator.accumulate():
        scheduler.step()
    with accelerator.accumulate():
        optimizer.outcome = StepOutcome.SKIPPED
        scheduler.step()
    assert rates(accelerator, optimizer, scheduler, 2) == [1.0, 0.8]


def test_a_schedule_that_is_given_a_metric_sees_it_once() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    scheduler = GatedScheduler(plateau, [], GradientState(), steps_per_call=4)
    seen = []
    for metric in (1.0, 1.0, 1.0, 1.0):
        scheduler.step(metric)
        seen.append(scheduler.get_last_lr()[0])
    assert seen == [1.0, 1.0, 0.5, 0.5]


def test_state_goes_in_and_out() -> None:
    accelerator = Accelerator()
    optimizer, scheduler = prepared(accelerator)
    rates(accelerator, optimizer, scheduler, 3)
    state = scheduler.state_dict()
    _, other = prepared(accelerator)
    other.load_state_dict(state)
    assert (other.scheduler.last_epoch, other.get_last_lr()) == (3, scheduler.get_last_lr())
    with pytest.warns(UserWarning, match="please use `get_last_lr"):
        assert len(other.get_lr()) == 1
