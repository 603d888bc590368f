"""What the tests of FP8 train: layers whose sizes fit, one that does not, and batches that are no multiple of 16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.callback import Callback
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.inner = nn.Linear(32, 64)
        self.outer = nn.Linear(64, 32)
        self.kinds: set[str] = set()
        self.formats: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.outer(F.gelu(self.inner(self.norm(x))))
        self.kinds.add(type(self.inner).__name__)
        self.formats.add(added.dtype)
        return x + added


class Classes(Task):
    """Tells four classes apart. Its first layer is 8 x 32 and its last 32 x 4."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.last = nn.Linear(32, 4)

    @property
    def kinds(self) -> set[str]:
        """The classes of which the first layer of a block was when it computed."""
        return {kind for block in self.blocks for kind in block.kinds}

    @property
    def formats(self) -> set[torch.dtype]:
        """The formats of what the last layer of a block gave."""
        return {kind for block in self.blocks for kind in block.formats}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.blocks(self.first(x)))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Records(Callback):
    """The loss of each step, over all processes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])


def make(seed: int = 1, **options: Any) -> Classes:
    torch.manual_seed(seed)
    return Classes(**options)


def batches(count: int = 4, size: int = 10) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    features = [torch.randn(size, 8, generator=generator) for _ in range(count)]
    return [(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()) for x in features]


def fit(task: Task, data: Any = None, *, val: Any = None, resume_from: Any = None, **options: Any) -> Trainer:
    settings = {"max_epochs": 3, "progress": False, "trackers": False, "project_dir": ".", "log_every": 1}
    trainer = Trainer(**(settings | options))
    trainer.fit(task, batches() if data is None else data, val, resume_from=resume_from)
    return trainer


def losses(task: Task, **options: Any) -> list[float]:
    records = Records()
    fit(task, callbacks=[records, *options.pop("callbacks", [])], **options)
    return records.losses
