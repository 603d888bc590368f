"""`loopwright checkpoint verify`: every file of checkpoints, read and compared with its checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checkpoint.manifest import FILE_NAME, read_manifest
from ..checkpoint.reading import Checkpoint, open_checkpoint
from ..checkpoint.space import readable
from ..distributed.errors import CheckpointError
from .checkpoint import DAMAGED


def run_verify(paths: Sequence[str], *, as_json: bool = False) -> int:
    """Verify checkpoints, and say of each whether it is whole; returns 1 if one is not.

    Args:
        paths: checkpoints, and folders with some at any depth.
        as_json: print one object, with the damage of each by its path.
    Raises:
        CheckpointError: at a path there is none.
    """
    folders = dict.fromkeys(folder for path in paths for folder in _found(Path(path)))
    damage: dict[str, list[str]] = {}
    for folder in folders:
        damage[str(folder)], text = _verify(folder)
        if not as_json:
            lines = [f"{folder}: damaged: {each}" for each in damage[str(folder)]] or [f"{folder}: whole, {text}"]
            print("\n".join(lines), flush=True)
    if as_json:
        print(json.dumps(damage, indent=2))
    return DAMAGED if any(damage.values()) else 0


def _verify(folder: Path) -> tuple[list[str], str]:
    """What is wrong, and what to say if nothing is."""
    try:
        checkpoint = Checkpoint(folder, read_manifest(folder))
        entries = checkpoint.manifest.files.values()
        text = f"{len(entries)} files, {readable(sum(each.size_bytes for each in entries))}"
        if checkpoint.unlisted_files:
            text += f"; not part of it: {', '.join(checkpoint.unlisted_files)}"
        return checkpoint.find_damage(), text
    except (CheckpointError, OSError) as error:
        return [str(error)], ""


def _found(path: Path) -> list[Path]:
    """The checkpoint at a path, or those below it."""
    if (path / FILE_NAME).is_file():
        return [path]
    found = sorted(_below(path)) if path.is_dir() else []
    if not found:
        open_checkpoint(path)  # says why it is none
    return found


def _below(path: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(path):
        is_checkpoint = FILE_NAME in files
        if is_checkpoint:
            yield Path(folder)
        # Hidden ones are being written, or were left half-written.
        names[:] = [] if is_checkpoint else [name for name in names if not name.startswith(".")]
