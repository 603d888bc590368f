"""A training that SLURM starts: it says how each leg of it ended, and leaves its weights."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright import ModelCheckpoint, Preemption, Task, Trainer


class Line(Task):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
        self.seconds = seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(name: str, seconds: str) -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    callbacks = [ModelCheckpoint("1 epoch"), Preemption()]
    trainer = Trainer(
        max_epochs=4, seed=3, name=name, trackers="jsonl", log_every="1 step", progress=False, callbacks=callbacks
    )
    task = Line(float(seconds))
    try:
        trainer.fit(task, DataLoader(data, batch_size=8, shuffle=True), resume_from="latest")
    finally:
        if trainer.process.is_main_process:
            restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
            leg = {"restart": restart, "from": trainer.resumed_step, "to": trainer.state.step, "by": trainer.signal}
            with Path(f"{name}.legs").open("a") as file:
                file.write(json.dumps(leg) + "\n")
    trainer.save_model(f"{name}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
