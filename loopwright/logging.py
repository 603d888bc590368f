"""The names that users of Accelerate import from `accelerate.logging`."""

from __future__ import annotations

from .distributed.logger import ProcessLogger as MultiProcessAdapter
from .distributed.logger import get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
