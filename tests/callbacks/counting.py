"""Fits in which the weight is minus the number of steps, so that a checkpoint tells its step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loopwright import Callback, ModelCheckpoint, Task, Trainer
from loopwright.checkpoint.reading import open_checkpoint

EVERY = [
    (2, 1, [2, 4, 6]),
    ("2 steps", 2, [2]),
    ("2 batches", 3, [1, 2]),
    ("0.5 epoch", 1, [3, 6]),
    (["first", "last"], 1, [1, 6]),
    (["4 samples", "5 steps"], 1, [4, 5]),
]
"""`every` and `accumulate`, and the steps at which a run of 6 batches of one sample then saves."""


class Counting(Task):
    """Its weight falls by the batch's value at each step. Validation logs the given values, and NaN before training."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.values = values
        self.num_validations = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch.item() == -1:
            raise RuntimeError("broken batch")
        self.log("train/loss", 7.0, on_step=False, on_epoch=True)
        return self.w * batch.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.state.stage == "sanity":
            self.log("val/loss", math.nan)
            return
        self.log("val/loss", self.values[self.num_validations])
        self.log("val/other", float(self.num_validations))
        self.num_validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches(count: int) -> list[Tensor]:
    return [torch.ones(1)] * count


def fit(
    checkpoint: ModelCheckpoint,
    values: Sequence[float] = (),
    *,
    train: Iterable[Tensor] | None = None,
    callbacks: Sequence[Callback] = (),
    resume_from: Any = None,
    **arguments: Any,
) -> Trainer:
    """One step per epoch, and one validation after it for each value."""
    arguments = {"trackers": False, "progress": False, "max_epochs": len(values) or 1, "name": "run", **arguments}
    trainer = Trainer(callbacks=[checkpoint, *callbacks], **arguments)
    trainer.fit(
        Counting(values),
        batches(1) if train is None else train,
        batches(1) if values else None,
        resume_from=resume_from,
    )
    return trainer


def files(folder: Path) -> dict[str, float]:
    """The weight in each file of a folder, by the file's name. Fails on anything else that lies there."""
    entries = [entry for entry in folder.iterdir() if entry.name != ".claim"]  # which is there during fit
    assert all(entry.is_file() and entry.suffix == ".safetensors" for entry in entries)
    return {entry.name: load_file(entry)["w"].item() for entry in entries}


def states(folder: Path) -> dict[str, float]:
    """The weight in each whole state of a folder, by its name. Fails on anything else that lies there."""
    entries = sorted(entry for entry in folder.iterdir() if entry.name != ".claim")
    return {entry.name: open_checkpoint(entry).weights()["w"].item() for entry in entries}
