"""A task whose averages of weights are known."""

from __future__ import annotations

from typing import Any

from ..trainer.tiny import Scalar


class Rising(Scalar):
    """A `Scalar` whose weight grows by 1 per step; notes and logs the weight that each validation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return -super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.value)
        self.log("val", self.w)
