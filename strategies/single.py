"""One process on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError
from .memory import StrategyMemory, Surroundings, WholeMemory
from .optimizer import move_optimizer_state
from .strategy import Strategy


@final
class SingleDeviceStrategy(Strategy):
    """Trains in one process on its device: `strategy="single"`, and what `"auto"` means without a launcher."""

    takes_several = False

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        if self.process.num_processes > 1:
            raise ConfigError(
                f"strategy='single' trains in one process, but {self.process.num_processes} were started. Use "
                "strategy='ddp', or 'auto'."
            )
        model.to(self.device)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        return model, list(optimizers)

    def check_splitting(self) -> None:
        pass

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        return WholeMemory("single") if surroundings.num_processes == 1 else None
