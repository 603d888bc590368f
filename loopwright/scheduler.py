"""The names that users of Accelerate import from `accelerate.scheduler`."""

from __future__ import annotations

from .strategies.scheduler import GatedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
