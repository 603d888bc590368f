"""A small convolutional classifier of digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from loopwright import Task

from .data import Batch


def digit_network(width: int) -> nn.Sequential:
    """Two convolutions and a linear layer: images (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * width * 16, 10),
    )


class Digits(Task):
    """Tells the ten digits apart.

    Args:
        width: channels of the first convolution; the second has twice as many.
        learning_rate: of AdamW.
    """

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.network = digit_network(width)
        self.learning_rate = learning_rate

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, 10) of images of shape (batch, 1, 8, 8)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean cross-entropy of a batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, progress_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val/loss` and `val/accuracy`."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `test/loss` and `test/accuracy`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest digit of each image, int64 of shape (batch,)."""
        images, _ = batch
        digits: Tensor = self(images).argmax(dim=1)
        return digits

    def configure_optimizers(self) -> Optimizer:
        """AdamW with a constant rate: the run is short."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _evaluate(self, batch: Batch, stage: str) -> None:
        images, labels = batch
        logits = self(images)
        is_right = logits.argmax(dim=1) == labels
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels))
        self.log(f"{stage}/accuracy", is_right.float().mean(), progress_bar=True)
