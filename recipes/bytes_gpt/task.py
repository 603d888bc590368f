"""Next-byte prediction with exact weighting of tokens."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from loopwright import Task, create_optimizer

from .data import IGNORED
from .model import BytesModel

Batch = tuple[Tensor, Tensor]


class BytesGPT(Task):
    """A GPT that predicts the next byte of a text.

    Args:
        width: features of a token.
        num_layers: blocks.
        num_heads: attention heads of a block.
        context: the longest sequence; the data's rows are as long.
        learning_rate: the highest rate of AdamW.
        warmup_steps: optimizer steps in which the rate rises to it.
        total_steps: optimizer steps after which the rate has fallen to a tenth, on a cosine.
        optimizer: its name: AdamW, or one that takes the same settings, such as `adamw8bit`.
    """

    def __init__(
        self,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        context: int = 128,
        learning_rate: float = 4e-3,
        warmup_steps: int = 50,
        total_steps: int = 800,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__()
        self.model = BytesModel(width=width, num_layers=num_layers, num_heads=num_heads, context=context)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.optimizer = optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all bytes and their number, so that each byte weighs the same."""
        loss_sum, count = self._loss(batch)
        self.log("train/bits_per_byte", (loss_sum / math.log(2), count), progress_bar=True)
        return loss_sum, count

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val/bits_per_byte`: the mean over all bytes of the held-out files, each counted once."""
        loss_sum, count = self._loss(batch)
        self.log("val/bits_per_byte", (loss_sum / math.log(2), count), progress_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer, with a linear rise and a cosine fall per optimizer step."""
        settings = {"lr": self.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
        optimizer = create_optimizer(self.optimizer, self.parameters(), **settings)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._rate), "interval": "step"},
        }

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self.model(inputs)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss_sum, (targets != IGNORED).sum()

    def _rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
