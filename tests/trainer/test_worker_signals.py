"""DataLoader workers when a run ends early: by SIGTERM to all processes of a group, and by an exception."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright import Task, Trainer
from loopwright.checkpoint.finding import newest

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from loopwright import ModelCheckpoint, Task, Trainer


class Slow(Task):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            print("training", flush=True)
        time.sleep(0.05)
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noisy(TensorDataset):
    pass


data = (Noisy if sys.argv[1] == "draws" else TensorDataset)(torch.ones(4000, 1))
trainer = Trainer(max_epochs=1, name="run", trackers=False, progress=False, callbacks=ModelCheckpoint("1 epoch"))
trainer.fit(Slow(), DataLoader(data, batch_size=1, num_workers=2))
"""


@pytest.mark.parametrize("data", ["draws", pytest.param("draws nothing", marks=pytest.mark.slow)])
def test_a_group_that_gets_sigterm_ends_in_order_with_an_exact_checkpoint(tmp_path: Path, data: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, "script.py", data], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "training\n"
    os.killpg(run.pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 143, errors
    found = newest(tmp_path / "runs" / "run" / "checkpoints")
    assert found is not None
    assert found.manifest.inexact == ()


class _Failing(Task):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.where = nn.Linear(1, 1), where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss_at("training", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss_at("sanity" if self.trainer.state.step == 0 else "validation", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss_at("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _loss_at(self, place: str, batch: Any) -> Tensor:
        if place == self.where:
            raise ValueError(f"failed in {place}")
        loss: Tensor = self.net(batch[0]).mean()
        return loss


@pytest.mark.parametrize("where", ["training", "sanity", "validation", "predict"])
def test_workers_end_with_a_run_although_its_exception_is_kept(where: str, tmp_path: Path) -> None:
    train, other = (DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1, num_workers=2) for _ in range(2))
    trainer = Trainer(max_epochs=1, val_every="2 steps", progress=False, trackers=False, project_dir=tmp_path)
    gc.collect()
    gc.disable()  # it would end them sooner or later
    try:
        with pytest.raises(ValueError, match=f"failed in {where}") as kept:
            if where == "predict":
                trainer.predict(_Failing(where), other)
            else:
                trainer.fit(_Failing(where), train, other)
        assert kept.value is not None
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
