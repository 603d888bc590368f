"""Cases of the category precision, by their ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.gradients import GradientMonitor
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from ..trainer.tiny import Pair, Watch, fit


def test_b53_clipping_acts_on_unscaled_gradients() -> None:
    precision = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0))
    task = Pair()
    fit(task, [torch.tensor([3.0, 4.0])], precision=precision, clip_norm=1.0)
    assert task.w.tolist() == pytest.approx([-0.6, -0.8])


def test_b53_the_norm_that_clipping_reports_is_unscaled() -> None:
    norms: list[float] = []
    precision = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0))

    def look(trainer: Any, task: Any, optimizer: Any) -> None:
        norms.append(trainer.strategy.clip_grad_norm(task.parameters(), 1.0).item())

    task = Pair()
    fit(task, [torch.tensor([3.0, 4.0])], precision=precision, callbacks=Watch(before_step=look))
    assert norms == [5.0]
    assert task.w.tolist() == pytest.approx([-0.6, -0.8])


def test_b53_the_monitored_norm_is_unscaled() -> None:
    memory = MemoryTracker()
    precision = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0))
    monitor = GradientMonitor(every=1)
    fit(Pair(), [torch.tensor([3.0, 4.0])], precision=precision, callbacks=monitor, trackers=memory, log_every=1)
    assert memory.runs[0].series("grad_norm") == [(1, 5.0)]


def test_b107_a_no_grad_forward_first_keeps_the_gradients() -> None:
    class Net(Task):
        def __init__(self, looks_first: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.looks_first = looks_first

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.looks_first:
                with torch.no_grad():
                    self.net(batch)
            assert torch.is_autocast_cache_enabled()
            return self.net(batch).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def gradients(looks_first: bool) -> list[Tensor]:
        found: list[Tensor] = []
        keep = Watch(before_step=lambda trainer, task, _: found.extend(p.grad.clone() for p in task.parameters()))
        fit(Net(looks_first), [torch.arange(8.0).reshape(2, 4) / 8], precision="bf16", callbacks=keep)
        assert len(found) == 4
        return found

    for first, second in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(first, second, atol=1e-2, rtol=0)
