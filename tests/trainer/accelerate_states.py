"""A script for Hugging Face Accelerate: it trains, saves its states, goes on, and prints what it computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Counter:
    """An object of the user's with a state."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.count = state["count"]


def main(folder: Path) -> dict[str, Any]:
    """One epoch, a checkpoint in each layout, one epoch more."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, mixed_precision="no")
    set_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3) / 36), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(Counter(7))
    losses = []
    for epoch in range(2):
        for (inputs,) in loader:
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state()
            accelerator.save_state(safe_serialization=False)
            accelerator.save_model(model, folder / "sharded", max_shard_size=60)
    return {"losses": losses[6:], "weights": [parameter.tolist() for parameter in model.parameters()]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]))))
