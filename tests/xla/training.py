"""A small task, its data, and a run of it, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright import Task, Trainer, set_seed

WIDTH = 16


class Words(Task):
    """Guesses a word from the words before; the embedding is the output layer as well."""

    def __init__(self, drop: float = 0.0, ties: bool = True, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = norm(WIDTH)
        self.dropout = nn.Dropout(drop)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        if ties:
            self.output.weight = self.embedding.weight
        self.losses: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        mixed = self.embedding(words).mean(1)
        for block in self.blocks:
            mixed = mixed + block(mixed)
        found: Tensor = self.output(self.dropout(self.norm(mixed)))
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)}


def data(count: int, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WIDTH, (count, 6), generator=generator)
    return TensorDataset(words, words.sum(1) % WIDTH)


def loader(count: int, batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(data(count), batch_size, shuffle=shuffle)


def make(seed: int = 1, **options: Any) -> Words:
    set_seed(seed)
    return Words(**options)


def trainer(strategy: Any = "xla", **options: Any) -> Trainer:
    settings = {"max_epochs": 2, "trackers": False, "progress": False, "seed": 3, "sanity_val_batches": 0}
    return Trainer(**(settings | {"strategy": strategy} | options))


def numbers(losses: list[Tensor]) -> list[float]:
    return [float(loss) for loss in losses]


def state_of(task: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in task.state_dict().items()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


def checkpoint(found: Trainer) -> Path:
    return max(Path(found.settings.project_dir).rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent
