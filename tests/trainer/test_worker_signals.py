"""SIGTERM to all processes of a group, as launchers and SLURM send it, with DataLoader workers among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("data", ["draws", "draws nothing"])
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
