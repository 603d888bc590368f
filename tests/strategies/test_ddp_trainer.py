"""DDP under the Trainer on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.distributed.errors import DistributedError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]


class Mean(Task):
    """Its loss is the weight times the mean of the batch."""

    def __init__(self, has_spare: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.spare = nn.Linear(1, 1) if has_spare else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(task: Task, count: int, **options: Any) -> Trainer:
    """A run over the numbers from 1, one in each batch, in order."""
    numbers = torch.arange(1.0, count + 1).view(-1, 1)
    trainer = Trainer(max_epochs=1, progress=False, trackers=False, project_dir=".", **options)
    trainer.fit(task, DataLoader(TensorDataset(numbers), batch_size=1))
    return trainer


def _sends() -> tuple[int, float]:
    """The all-reduces of three steps of four micro-batches, and the weight after them."""
    task = Mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        fit(task, 24, strategy="ddp", accumulate=4)
    return sum(event.name == "gloo:all_reduce" for event in profiler.events()), task.net.weight.item()


def test_one_reduction_per_step_whatever_the_accumulation(two_processes: Run) -> None:
    # Each step has the gradient of the mean of 8 numbers: 4.5, 12.5 and 20.5.
    assert two_processes(_sends) == [(3, -37.5)] * 2


def _options(strategy: Any) -> float:
    task = Mean()
    fit(task, 8, strategy=strategy, accumulate=2)
    return task.net.weight.item()


def test_words_and_options(two_processes: Run) -> None:
    for strategy in ("auto", {"name": "ddp", "comm_hook": "bf16", "static_graph": True, "broadcast_buffers": False}):
        # Two steps, with the means of 1 to 4 and of 5 to 8.
        assert two_processes(_options, strategy) == [-9.0] * 2


def _unused() -> tuple[str, float]:
    task = Mean(has_spare=True)
    try:
        fit(task, 4)
    except DistributedError as error:
        return str(error), task.net.weight.item()
    return "none", task.net.weight.item()


def test_unused_parameters_of_a_task_are_named(two_processes: Run) -> None:
    for text, weight in two_processes(_unused):
        assert text.startswith("parameters spare.weight, spare.bias of Mean had no part in the loss")
        assert weight == 0.0
