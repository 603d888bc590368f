"""Cases of the category scheduler, by their ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, StepLR

from loopwright.strategies.precision import ScaledPrecision
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.task import Task

from ..trainer.tiny import Scalar, Scheduled, Watch, fit, ones


def test_b10_a_schedule_by_steps_counts_optimizer_steps() -> None:
    task = Scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step")
    fit(task, ones(8), accumulate=2)
    assert task.rate == 0.0625
    assert task.scheduler.last_epoch == 4


@pytest.mark.parametrize("fused", [False, True])
def test_b13_a_skipped_step_is_noticed_with_a_fused_optimizer(fused: bool) -> None:
    class Net(Task):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).sum()

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.5, fused=fused)
            schedule = StepLR(self.optimizer, 1, gamma=0.5)
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    task, precision = Net(), ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=65536.0))
    found = fit(task, [torch.tensor([float("inf"), 1.0])], precision=precision)
    assert (found.state.step, found.state.skipped_steps) == (0, 1)
    assert task.optimizer.param_groups[0]["lr"] == 0.5
    assert task.w.tolist() == [1, 1]
    assert precision.scaler.get_scale() == 32768


@pytest.mark.filterwarnings("ignore:validation never ran")
def test_b14_a_plateau_schedule_whose_run_ends_before_validation() -> None:
    class Plateau(Scheduled):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    task = Plateau(ReduceLROnPlateau, monitor="val_loss")
    found = fit(task, ones(3), ones(1), max_steps=1)
    assert (found.state.step, task.rate) == (1, 1)


def test_b16_a_cosine_schedule_goes_on_from_its_state() -> None:
    """The user's own way of going on, with the states of optimizer and scheduler; `resume_from` is another test."""
    rates: list[float] = []

    class Cosine(Scalar):
        def __init__(self, states: Any = None) -> None:
            super().__init__()
            self.states = states

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.schedule = CosineAnnealingLR(self.optimizer, T_max=10)
            if self.states:
                self.optimizer.load_state_dict(self.states[0])
                self.schedule.load_state_dict(self.states[1])
            return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    watch = Watch(before_step=lambda trainer, task, optimizer: rates.append(optimizer.param_groups[0]["lr"]))
    fit(Cosine(), ones(10), callbacks=watch)
    whole = rates.copy()
    rates.clear()
    first = Cosine()
    fit(first, ones(10), max_steps=5, callbacks=watch)
    second = Cosine((first.optimizer.state_dict(), first.schedule.state_dict()))
    fit(second, ones(10), max_steps=5, callbacks=watch)
    assert rates[5:7] == [pytest.approx(0.5), pytest.approx(0.345492, abs=1e-6)]
    assert rates == pytest.approx(whole, abs=1e-12)


def test_b91_another_planned_length_does_not_stretch_a_schedule_that_was_begun() -> None:
    def prepared(total: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=total)
        return Accelerator(cpu=True).prepare(optimizer, schedule)  # type: ignore[no-any-return]

    def step(optimizer: torch.optim.Optimizer, schedule: Any) -> float:
        optimizer.step()
        schedule.step()
        return float(optimizer.param_groups[0]["lr"])

    first = prepared(10)
    assert [step(*first) for _ in range(5)][-1] == pytest.approx(0.5)
    second = prepared(20)
    second[0].load_state_dict(first[0].state_dict())
    with pytest.warns(UserWarning, match="LinearLR was built for 20 steps, but its state comes from a schedule of 10"):
        second[1].load_state_dict(first[1].state_dict())
    assert second[0].param_groups[0]["lr"] == pytest.approx(0.5)
    assert step(*second) == pytest.approx(0.4)
