"""`Accelerator`: the layer for those who own their loop, and the one that the Trainer stands on."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.process import ProcessState
from ..strategies.gradient_state import GradientAccumulationPlugin, GradientState
from ..strategies.precision import Precision, create_precision
from ..strategies.registry import create_strategy
from ..strategies.strategy import Strategy


class Accelerator:
    """Prepares models, optimizers, loaders and schedulers, and carries out their steps.

    Args:
        mixed_precision: `"no"`, `"bf16"` or `"fp16"`.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: stay on the CPU although there is an accelerator.
        gradient_accumulation_plugin: accumulation with its further settings, instead of the number alone.
        strategy: how a step is carried out.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        strategy: str | dict[str, Any] | Strategy = "auto",
    ) -> None:
        self.state = ProcessState(cpu=cpu)
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)
        self.gradient_state = GradientState(plugin)
        self.precision = create_precision(mixed_precision, self.device)
        self.strategy = create_strategy(strategy)
        self.strategy.attach(self.state, self.precision, self.gradient_state)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.state.device
