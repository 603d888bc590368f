"""One process on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn
from torch.optim import Optimizer

from .optimizer import move_optimizer_state
from .strategy import Strategy


@final
class SingleDeviceStrategy(Strategy):
    """Trains in one process on its device: `strategy="single"`, and what `"auto"` means without a launcher."""

    def setup(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        model.to(self.device)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        return model, list(optimizers)
