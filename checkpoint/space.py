"""Room on the file system, asked for before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

from ..distributed.errors import CheckpointError

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse what does not fit. Local.

    Args:
        folder: where it will be written; it need not exist yet.
        needed_bytes: what is going to be written.
    Raises:
        CheckpointError: less is free; says how much of both.
        OSError: the file system does not answer.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    if not found.f_blocks:  # this file system does not say how large it is
        return
    free = found.f_bavail * found.f_frsize
    if needed_bytes > free:
        raise CheckpointError(
            f"the checkpoint needs {readable(needed_bytes)}, and {readable(free)} are free at {str(folder)!r}. Free "
            "some space, or choose another folder. Nothing was written."
        )


def readable(size_bytes: int) -> str:
    """A size for people: `"604.2 MB"`. Local."""
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} bytes"
