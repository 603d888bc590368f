"""States that older versions wrote, brought up to date; the one place that knows of older layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..distributed.errors import CheckpointError
from .states import VERSION


def migrated(tree: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The tree as this version writes it.

    Raises:
        CheckpointError: it was written by a newer version.
    """
    version = tree.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"the state in {str(path)!r} has the version {version}, and this version of loopwright reads up to "
            f"{VERSION}. Update loopwright."
        )
    metrics = {"last_values_at": -1} | tree["metrics"]
    return {"due_since": None, **tree, "metrics": metrics}  # what the first states of this version did not have
