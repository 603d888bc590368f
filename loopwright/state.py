"""The names that users of Accelerate import from `accelerate.state`."""

from __future__ import annotations

from .distributed.process import PartialState
from .strategies.gradient_state import GradientState
from .trainer.accelerator_state import AcceleratorState

__all__ = ["AcceleratorState", "GradientState", "PartialState"]
