"""`StragglerMonitor` on two processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.stragglers import StragglerMonitor
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.group import rank
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]
NAP = 0.05


class Napping(Task):
    """The process `slow` naps in each forward pass, from the micro-batch `since` on."""

    def __init__(self, slow: int, since: int = 0) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.slow = slow
        self.since = since

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if rank() == self.slow and batch_idx >= self.since:
            time.sleep(NAP)
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(Callback):
    def __init__(self) -> None:
        self.all: list[tuple[int, float, float]] = []

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        if "straggler/process" in metrics:
            self.all.append((step, metrics["straggler/process"], metrics["straggler/slowdown"]))


def watch(slow: int, since: int) -> tuple[list[tuple[int, float, float]], list[str]]:
    """What was recorded, and the warnings that name a process."""
    seen = Seen()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            callbacks=[StragglerMonitor(patience=2), seen], max_steps=10, log_every=2, trackers=False, progress=False
        )
        trainer.fit(Napping(slow, since), [torch.ones(3, 2)] * 30)
    return seen.all, [str(each.message) for each in caught if "is slow" in str(each.message)]


def test_the_process_that_others_wait_for_is_named_once(two_processes: Run) -> None:
    results = two_processes(watch, 1, 0)
    records, warned = results[0]
    assert [step for step, _, _ in records] == [2, 4, 6, 8, 10]
    assert {process for _, process, _ in records} == {1.0}
    assert all(slowdown > 1.3 for _, _, slowdown in records)
    (text,) = warned
    assert text.startswith("process 1 is slow: 0.")
    assert "in the last 2 records until step 4" in text
    assert results[1] == (records, [])  # the same values on all, and the warning from the main process alone


def test_one_process_has_nothing_to_compare() -> None:
    assert watch(0, 0) == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"factor": 1.0}, r"StragglerMonitor\(factor=1\.0\)"), ({"patience": 0}, r"StragglerMonitor\(patience=0\)")],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StragglerMonitor(**options)
