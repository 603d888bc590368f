"""The same training in Loopwright."""

from __future__ import annotations

import tempfile
from typing import Any

from ticks import Ticker
from workloads import Workload

from loopwright import Callback, Task, Trainer


class BenchmarkTask(Task):
    """A workload as a task; `options` are those of `self.log`, None logs nothing."""

    def __init__(self, work: Workload, ticker: Ticker, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.net = work.model()
        self.work = work
        self.ticker = ticker
        self.loss_function = work.loss
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One loss, as in the raw loop."""
        self.ticker.tick()
        x, y = batch
        loss = self.loss_function(self.net(x), y)
        if self.options is not None:
            self.log("train/loss", loss, **self.options)
        return loss

    def configure_optimizers(self) -> Any:
        """The optimizer of the raw loop."""
        return self.work.optimizer(self)


class NoOp(Callback):
    """A callback that overrides nothing."""


class OneHook(Callback):
    """A callback with one event, which does nothing."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        """Nothing."""


def fit(task: BenchmarkTask, steps: int, **options: Any) -> None:
    """Train for so many optimizer steps, in a folder that is removed afterwards; `options` are the Trainer's."""
    work = task.work
    _, _, loader = work.build(steps)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(max_epochs=1, accumulate=work.accumulate, project_dir=folder, **options).fit(task, loader)


def run_trainer_bare(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers."""
    fit(BenchmarkTask(work, ticker), steps, progress=False, trackers=False)


def run_trainer_defaults(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer as it comes (bar, TensorBoard), with `self.log` in each step."""
    fit(BenchmarkTask(work, ticker, {}), steps)


def run_trainer_callback(work: Workload, ticker: Ticker, steps: int) -> None:
    """The bare Trainer and one callback that overrides nothing."""
    fit(BenchmarkTask(work, ticker), steps, progress=False, trackers=False, callbacks=[NoOp()])


def run_trainer_hook(work: Workload, ticker: Ticker, steps: int) -> None:
    """The bare Trainer and one callback with one empty `on_step`."""
    fit(BenchmarkTask(work, ticker), steps, progress=False, trackers=False, callbacks=[OneHook()])


def run_trainer_log(work: Workload, ticker: Ticker, steps: int) -> None:
    """The bare Trainer and one `self.log(on_step=True, on_epoch=True)`."""
    task = BenchmarkTask(work, ticker, {"on_step": True, "on_epoch": True})
    fit(task, steps, progress=False, trackers=False)


def run_accelerator(work: Workload, ticker: Ticker, steps: int, **options: Any) -> None:
    """Loopwright's Accelerator in the user's own loop; `options` are its own."""
    from loopwright import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate, **options)
    model, optimizer, loader = accelerator.prepare(*work.build(steps))
    loss_function = work.loss
    for x, y in loader:
        ticker.tick()
        with accelerator.accumulate(model):
            loss = loss_function(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
