"""Settings of prepared loaders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLoaderConfiguration:
    """How `Accelerator` prepares loaders; the names are Accelerate's."""

    non_blocking: bool = False
    """Let copies to the device go on in the background where the memory is pinned."""
