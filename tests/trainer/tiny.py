"""What the tests of the loop train: tasks so small that every number of a run can be worked out by hand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.callbacks.bus import EVENTS
from loopwright.callbacks.callback import Callback
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer


class Scalar(Task):
    """One weight w, which begins at 0; a batch's loss is the mean of w * batch, so its gradient is the batch's mean.

    With learning rate 1 and batches of ones every applied step moves w by -1.
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.lr = lr
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", batch.float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", batch.float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    @property
    def value(self) -> float:
        """w as a number."""
        return self.w.item()


class Pair(Task):
    """Two weights that begin at 0; the gradient of a batch is the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Scheduled(Scalar):
    """A `Scalar` with a learning-rate schedule; `rates` holds the rate at the end of each batch."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], **options: Any) -> None:
        super().__init__()
        self.make, self.options = make, options
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.scheduler = self.make(self.optimizer)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.scheduler, **self.options}}

    @property
    def rate(self) -> float:
        """The learning rate as it is now."""
        return float(self.optimizer.param_groups[0]["lr"])


class Loss(Task):
    """Its batches are the losses: each is returned as it is, with a gradient of 1 for the one weight."""

    def __init__(self, **log_options: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.log_options = log_options

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = batch.mean() + self.w - self.w.detach()
        self.log("loss", loss, **self.log_options)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Weighed(Task):
    """Batches are pairs of token losses, of which some are to be left out, and a mask; returns `(loss_sum, count)`."""

    def __init__(self, count: Callable[[Tensor], Any] = lambda mask: int(mask.sum())) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.count = count

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        losses, mask = batch
        pair = ((losses * mask * self.w).sum(), self.count(mask))
        self.log("loss", ((losses * mask).sum(), self.count(mask)))
        return pair

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


ONE = torch.ones(1)


def ones(count: int) -> list[Tensor]:
    """Batches of one sample each, all 1."""
    return [ONE] * count


def batches(*values: float) -> list[Tensor]:
    """Batches of one sample each."""
    return [torch.tensor([float(value)]) for value in values]


def trainer(**options: Any) -> Trainer:
    """A silent Trainer of one epoch, with no validation before it."""
    given: dict[str, Any] = {"trackers": False, "progress": False, "sanity_val_batches": 0} | options
    if not given.keys() & {"max_epochs", "max_steps", "max_time", "fast_dev_run"}:
        given["max_epochs"] = 1
    return Trainer(**given)


def fit(task: Task, train: Any = None, val: Any = None, **options: Any) -> Trainer:
    """Train with a silent Trainer; returns it."""
    found = trainer(**options)
    found.fit(task, train, val)
    return found


def tracked(task: Task, train: Any = None, val: Any = None, **options: Any) -> list[tuple[int, dict[str, float]]]:
    """Train; returns the records that went to the trackers."""
    memory = MemoryTracker()
    fit(task, train, val, trackers=memory, **options)
    return memory.runs[0].records


class Recorder(Callback):
    """Overrides every event, and writes down each with what `describe` makes of it.

    Args:
        log: where to write; shared by several recorders to see their order.
        prefix: written before each event's name.
        fail: events in which to raise, with what.
    """

    def __init__(
        self, log: list[str] | None = None, prefix: str = "", fail: dict[str, BaseException] | None = None
    ) -> None:
        self.log = [] if log is None else log
        self.prefix = prefix
        self.fail = fail or {}

    def see(self, event: str, trainer: Any, values: Sequence[Any]) -> None:
        """Write an event down, then raise if this one is to fail."""
        self.log.append(self.prefix + self.describe(event, trainer, values))
        if (error := self.fail.get(event)) is not None:
            raise error

    def describe(self, event: str, trainer: Any, values: Sequence[Any]) -> str:
        """The event's name."""
        return event

    def count(self, event: str) -> int:
        """How often an event fired."""
        return self.log.count(self.prefix + event)


def _recording(name: str) -> Any:
    def method(self: Recorder, trainer: Any, task: Any, *values: Any) -> None:
        self.see(name.removeprefix("on_"), trainer, values)

    method.__name__ = name
    return method


for _name in EVENTS:
    setattr(Recorder, _name, _recording(_name))


class Watch(Callback):
    """Calls a function after each event that is named: `Watch(step=lambda trainer, task, outcome: ...)`."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for event, function in functions.items():
            assert f"on_{event}" in EVENTS, event
            setattr(self, f"on_{event}", function)


def count_calls(task: Task, **options: Any) -> float:
    """Python calls per step from the 100th to the 300th, exact: no set-up is in it, and no record."""
    counted = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    original = task.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 100:
            sys.setprofile(hook)
        elif batch_idx == 300:
            sys.setprofile(None)
        return original(batch, batch_idx)

    task.__dict__["training_step"] = training_step
    gc.collect()
    gc.disable()  # what a collection finalises would be counted where it falls
    try:
        fit(task, ones(310), log_every="1000 steps", **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted / 200
