"""A script for the tests of restarts: trains, and in its first life one of its processes is killed on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from loopwright import Callback, ModelCheckpoint, Task, Trainer


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index)) + torch.randn(3)


class Net(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Killed(Callback):
    """Kills process 1 at a step, as long as nothing was started again."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first_life and trainer.state.step == self.step and trainer.process.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    trainer = Trainer(
        max_steps=10, seed=0, callbacks=[ModelCheckpoint("1 step"), Killed(step)], trackers="jsonl", progress=False,
        project_dir=folder, log_every=1,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Samples(), batch_size=4, shuffle=True))
    begun = trainer.resumed_step
    if trainer.process.is_main_process:
        trainer.save_model(folder / "end.safetensors")
        print(f"ended in {trainer.run_directory.name}, resumed from {begun}", flush=True)


if __name__ == "__main__":
    main()
