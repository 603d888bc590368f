"""What the tests of `Accelerator` train: one weight that starts at 0, whose gradient is the mean of the inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.trainer.accelerator import Accelerator


class Weight(nn.Module):
    """Multiplies its input by one weight. The loss of its output is the output's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def ones(num_samples: int, batch_size: int = 1) -> DataLoader[Any]:
    """Samples that all have the gradient 1."""
    return DataLoader(TensorDataset(torch.ones(num_samples)), batch_size=batch_size)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Iterable[Any]) -> list[tuple[bool, float]]:
    """One pass; for each micro-batch whether gradients synchronise, and the weight after it."""
    seen = []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append((accelerator.sync_gradients, model.weight.item()))
    return seen


def syncs(accelerator: Accelerator, loader: Iterable[Any]) -> str:
    """F and T: whether gradients synchronise at each batch of one pass."""
    seen = ""
    for _ in loader:
        with accelerator.accumulate():
            seen += "T" if accelerator.sync_gradients else "F"
    return seen


def parts(num_samples: int, batch_size: int = 1) -> tuple[Weight, torch.optim.Optimizer, DataLoader[Any]]:
    """A model, its optimizer (SGD, learning rate 1), and a loader of ones."""
    model = Weight()
    return model, torch.optim.SGD(model.parameters(), lr=1.0), ones(num_samples, batch_size)
