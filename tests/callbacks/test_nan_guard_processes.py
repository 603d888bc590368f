"""`NaNGuard("skip")` with several processes and a model that computes with its buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.data.prepare import Presharded
from loopwright.distributed.random import set_seed
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]


class Scaled(nn.Module):
    """Multiplies by a buffer, which its forward pass changes in place."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0).nan_to_num(7.0), 0.5)
        return x * self.scale.clone()


class Reads(Task):
    """Batch norm, once more in eval mode with its buffers as constants, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scaled = nn.Linear(4, 3), nn.BatchNorm1d(3), Scaled()
        self.fixed = nn.BatchNorm1d(3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fixed.eval()
        return self.scaled(self.fixed(self.norm(self.first(batch)))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_of(index: int, bad: list[tuple[int, int]], left_out: set[int]) -> list[Tensor]:
    """Twelve batches of a process, of which some are NaN; without some windows of two."""
    found = list(torch.randn(12, 4, 4, generator=torch.Generator().manual_seed(index)))
    for process, number in bad:
        if process == index:
            found[number] = torch.full((4, 4), float("nan"))
    return [each for number, each in enumerate(found) if number // 2 not in left_out]


def trained(bad: list[tuple[int, int]], accumulate: int, skips: bool) -> dict[str, list[float]]:
    index = int(os.environ["RANK"])
    set_seed(1)
    task = Reads()
    left_out = set() if skips else {number // 2 for _, number in bad}
    trainer = Trainer(
        max_epochs=1, accumulate=accumulate, callbacks=NaNGuard("skip", locate=True), trackers=False, progress=False
    )
    trainer.fit(task, Presharded(data_of(index, bad, left_out)))
    trainer.strategy.synchronize_buffers(task)
    return {name: value.flatten().tolist() for name, value in task.state_dict().items() if "num_batches" not in name}


@pytest.mark.parametrize(
    "bad",
    [[(1, 2)], [(1, 3)], [(0, 2)], [(0, 5)], [(0, 4), (1, 5)], [(0, 1), (1, 4)]],
    ids=["1 first", "1 last", "0 first", "0 last", "both", "two windows"],
)
def test_skipped_windows_leave_no_trace_in_buffers(two_processes: Run, bad: list[tuple[int, int]]) -> None:
    """The same as a training whose data does not have these windows."""
    first, second = two_processes(both, bad)
    assert first[0] == first[1]
    assert second[0] == second[1]
    weights = [{name: each for name, each in found[0].items() if "running" not in name} for found in (first, second)]
    assert {name: each for name, each in weights[0].items() if name != "scaled.scale"} == {
        name: each for name, each in weights[1].items() if name != "scaled.scale"
    }


def both(bad: list[tuple[int, int]]) -> list[Any]:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NaNGuard skips a step")
        return [trained(bad, 2, skips) for skips in (True, False)]
