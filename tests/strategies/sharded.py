"""A task for the tests of sharding: tied weights, layers, a buffer that no state dict has, counts of uneven batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

WIDTH, WORDS, LENGTH = 8, 11, 6


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class Records(Callback):
    """The loss of each step, over all processes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return mixed


class Words(Task):
    """Predicts the next word. Words of 0 don't count."""

    scale: Tensor

    def __init__(self, num_layers: int = 3, kind: str = "adamw") -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.kind = kind
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(words))) * self.scale
        return logits

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        words = batch[0]
        logits, targets = self(words[:, :-1]), words[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        self.log("loss", (loss, count), on_step=True)
        return loss, count

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-2)


def words(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    found = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    found[:, -2:] *= torch.arange(count).remainder(3).bool()[:, None]
    return TensorDataset(found)


def loader(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(words(count), batch_size=batch_size)


def make(seed: int = 1, **options: Any) -> Words:
    torch.manual_seed(seed)
    return Words(**options)


def fit(task: Task, train: Any, val: Any = None, resume_from: Any = None, **options: Any) -> Trainer:
    settings = {"max_epochs": 1, "progress": False, "trackers": False, "project_dir": ".", "log_every": 1}
    trainer = Trainer(**(settings | options))
    trainer.fit(task, train, val, resume_from=resume_from)
    return trainer


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """The whole weights, on the main process. Collective."""
    state = trainer.strategy.whole_model_state(trainer._newest("test").model)
    return {name: value.clone() for name, value in state.items()}
