"""The names that users of Accelerate import from `accelerate.optimizer`."""

from __future__ import annotations

from .strategies.optimizer import GatedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
