"""The names that users of Accelerate import from `accelerate.logging`."""

from __future__ import annotations

from .distributed.logger import ProcessLogger, get_logger

__all__ = ["ProcessLogger", "get_logger"]
