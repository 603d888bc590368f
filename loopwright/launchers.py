"""The names that users of Accelerate import from `accelerate.launchers`."""

from __future__ import annotations

from .distributed.launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
