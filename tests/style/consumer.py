"""A user's file. `make types` checks it against the installed wheel: the public names are typed there."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

from loopwright import ConfigError, RunState, Task, Trainer


class Line(Task):
    """A linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, y = batch
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("train/loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and see what the names are."""
    trainer = Trainer(max_epochs=1, trackers=False, progress=False)
    trainer.fit(Line(), [(torch.ones(2, 4), torch.ones(2, 1))])
    assert_type(trainer.state, RunState)
    assert_type(trainer.metrics, dict[str, float])
    assert issubclass(ConfigError, ValueError)
