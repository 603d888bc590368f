"""Tasks for the tests of `loopwright verify-resume`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from loopwright import Task


class Net(Task):
    """A small model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Noisy(Dataset[Tensor]):
    """Samples with noise; `own`: of a generator that nobody saves; `fresh`: seeded by the system as well."""

    def __init__(self, own: bool = False, fresh: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(1) if own else None
        if fresh:
            self.generator = torch.Generator()
            self.generator.seed()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index)) + torch.randn(3, generator=self.generator)


class Loaders:
    """The data of a run."""

    def __init__(self, own: bool = False, fresh: bool = False) -> None:
        self.options = {"own": own, "fresh": fresh}

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(**self.options), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=8)
