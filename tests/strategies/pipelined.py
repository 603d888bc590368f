"""A small GPT for the tests of pipelines, as layers that are called one after another."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

WIDTH, WORDS, LENGTH = 8, 11, 6


class Input(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        found: Tensor = (self.words(words) + self.places(places)) * self.scale
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a bias of keys has no gradient but noise
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_samples += self.training * x.shape[0]
        query, key, value = self.attention(self.first(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = x + self.outer(F.gelu(self.inner(self.second(x))))
        return mixed


class GPT(Task):
    """Predicts the next word."""

    def __init__(self, num_blocks: int = 4, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.input = Input()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.input, *self.blocks, self.norm, self.head]

    def pipeline_input(self, batch: Any) -> Tensor:
        words: Tensor = batch[0][:, :-1]
        return words

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[0][:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.run_pipeline(batch)
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.run_pipeline(batch))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}])
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)


class Counted(GPT):
    """Words of 0 don't count: each part of a batch has another number of those that do."""

    def pipeline_loss(self, output: Tensor, batch: Any) -> Any:
        targets = batch[0][:, 1:]
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()


class Records(Callback):
    """What a run logs, and the norms of its gradients."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validated: list[float] = []

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])
        if "val/loss" in metrics:
            self.validated.append(metrics["val/loss"])

    def on_before_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        norms = trainer.gradient_norms([p for _, p in task.named_parameters()])
        self.norms = [-1.0 if norm is None else float(norm) for norm in norms]


def loader(count: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    begins, strides = torch.randint(0, WORDS, (2, count, 1), generator=generator)
    words = (begins + (1 + strides % 3) * torch.arange(LENGTH)) % WORDS
    return DataLoader(TensorDataset(words), batch_size=batch_size, **options)


def fit(task: Task, train: Any, val: Any = None, resume_from: Any = None, **options: Any) -> Trainer:
    settings = {"progress": False, "trackers": False, "project_dir": ".", "log_every": 1, "seed": 3}
    trainer = Trainer(**(settings | options))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        trainer.fit(task, train, val, resume_from=resume_from)
    return trainer
