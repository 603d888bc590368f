"""What the processes of test_failures.py run: trainings that fail, or are asked to end, on purpose.

`failing_training.py KIND INDEX`: process INDEX does it, in the fourth batch or the second validation. Each process says
what it went through in `events-<index>.json`, whatever ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.data.prepare import Presharded
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

BATCH = 3


class Data:
    """Batches of this process, an endless pass where a signal ends the run."""

    def __init__(self, kind: str, is_chosen: bool) -> None:
        self.kind, self.is_chosen = kind, is_chosen

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(100_000 if self.kind in ("sigterm", "interrupt") else 8):
            if self.kind == "data" and self.is_chosen and index == BATCH:
                raise ValueError("boom in the data")
            yield torch.ones(2)


class Fails(Task):
    """One weight, and the failure that its callback does not have."""

    def __init__(self, kind: str, is_chosen: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.kind, self.is_chosen = kind, is_chosen
        self.automatic_optimization = kind != "leave"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == BATCH and self.is_chosen:
            if self.kind == "step":
                raise ValueError("boom in the step")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "hang":
                time.sleep(120.0)
            if self.kind == "leave":
                raise SkipBatch
        return (self.w * batch).mean() if self.automatic_optimization else self.own_step((self.w * batch).mean())

    def own_step(self, loss: Tensor) -> Tensor:
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", batch.mean())
        if self.kind == "validation" and self.is_chosen and batch_idx == 2 and self.trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Events(Callback):
    """Writes down how the run ended."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.seen: list[str] = []

    def on_exception(self, trainer: Any, task: Any, error: BaseException) -> None:
        self.note(trainer, f"exception {type(error).__name__}")

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        self.note(trainer, "fit_end")

    def on_teardown(self, trainer: Any, task: Any) -> None:
        self.note(trainer, "teardown")

    def note(self, trainer: Any, event: str) -> None:
        self.seen.append(event)
        said = {"seen": self.seen, "step": trainer.state.step}
        Path(f"events-{self.index}.json").write_text(json.dumps(said))


class FailsInEvent(Callback):
    """Ends its process in `on_step`, or says that signals may come."""

    def __init__(self, kind: str, is_chosen: bool) -> None:
        self.kind, self.is_chosen = kind, is_chosen

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step != BATCH or not self.is_chosen:
            return
        match self.kind:
            case "callback":
                raise ValueError("boom in the callback")
            case "exit":
                sys.exit(3)
            case "keyboard":
                raise KeyboardInterrupt
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "interrupt":
                Path("is-training").touch()


def main(kind: str, chosen: int) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"devices": 2} if kind.startswith("own") else {}
    index = int(os.environ.get("RANK", "0"))
    kind = kind.removeprefix("own-")
    is_chosen = index == chosen
    trainer = Trainer(
        max_epochs=1, trackers=False, progress=False, val_every=2, sanity_val_batches=0, log_every=1,
        callbacks=[FailsInEvent(kind, is_chosen), Events(index)], process_timeout=4 if kind == "hang" else 60,
        **options,
    )  # fmt: skip
    trainer.fit(Fails(kind, is_chosen), Presharded(Data(kind, is_chosen)), [torch.ones(2)] * 6)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
