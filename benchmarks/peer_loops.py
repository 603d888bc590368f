"""The same training in other libraries, each in the form that its own documentation shows."""

from __future__ import annotations

import logging
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

from ticks import Ticker
from workloads import Workload

# mypy: disable-error-code="no-untyped-call,misc,import-untyped"


def run_accelerate(work: Workload, ticker: Ticker, steps: int) -> None:
    """Accelerate: `prepare`, then `accumulate`, `backward`, `step`, `zero_grad`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate)
    model, optimizer, loader = accelerator.prepare(*work.build(steps))
    loss_function = work.loss
    for x, y in loader:
        ticker.tick()
        with accelerator.accumulate(model):
            loss = loss_function(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def run_fabric(work: Workload, ticker: Ticker, steps: int) -> None:
    """Lightning Fabric: `setup`, `backward`; accumulation by hand, as its documentation shows it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain_model, plain_optimizer, plain_loader = work.build(steps)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    loader: Any = fabric.setup_dataloaders(plain_loader)
    loss_function, accumulate = work.loss, work.accumulate
    for index, (x, y) in enumerate(loader, start=1):
        ticker.tick()
        is_open = index % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_open) if accumulate > 1 else nullcontext():
            loss = loss_function(model(x), y)
            fabric.backward(loss / accumulate if accumulate > 1 else loss)
        if not is_open:
            optimizer.step()
            optimizer.zero_grad()


def run_ignite(work: Workload, ticker: Ticker, steps: int) -> None:
    """PyTorch Ignite: an `Engine` over an update function."""
    from ignite.engine import Engine

    model, optimizer, loader = work.build(steps)
    loss_function, accumulate = work.loss, work.accumulate

    def update(engine: Engine, batch: Any) -> Any:
        ticker.tick()
        x, y = batch
        loss = loss_function(model(x), y)
        (loss / accumulate if accumulate > 1 else loss).backward()
        if engine.state.iteration % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    Engine(update).run(loader, max_epochs=1)


def _lightning_module(work: Workload, ticker: Ticker, *, log: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()
            self.loss_function = work.loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ticker.tick()
            x, y = batch
            loss = self.loss_function(self.net(x), y)
            if log:
                self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return work.optimizer(self)

    return Module()


def _run_lightning(work: Workload, ticker: Ticker, steps: int, *, log: bool, **options: Any) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _, _, loader = work.build(steps)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=work.accumulate,
            default_root_dir=folder,
            **options,
        )
        trainer.fit(_lightning_module(work, ticker, log=log), loader)


def run_lightning_bare(work: Workload, ticker: Ticker, steps: int) -> None:
    """Lightning with everything off."""
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    _run_lightning(work, ticker, steps, log=False, **off)


def run_lightning_defaults(work: Workload, ticker: Ticker, steps: int) -> None:
    """Lightning as it comes, with `self.log` in each step."""
    _run_lightning(work, ticker, steps, log=True)
