"""Names of files and folders."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def free_path(
    path: Path, *, is_taken: Callable[[Path], bool] = Path.exists, mark: str = "-", suffix: str | None = None
) -> Path:
    """This path, or where it is taken the first of `name-2`, `name-3`, ... that is not. Local; nothing is made.

    Args:
        path: the path that is wanted.
        is_taken: whether a path can't be had; by default, whether it exists.
        mark: what stands before the number.
        suffix: the end of the name that the number stands before; by default the ending of a file. `""` for folders,
            whose names may have dots.
    """
    end = path.suffix if suffix is None else suffix
    stem = path.name.removesuffix(end)
    numbered = (path.with_name(f"{stem}{mark}{number}{end}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not is_taken(candidate))


def prove_writable(folder: Path) -> None:
    """Write a small file into this folder, and remove it at once. Local.

    Where the folder does not exist yet, the file is written where it would be made; so nothing is left behind.

    Raises:
        OSError: the folder can't be written to, or can't be made.
    """
    place = folder.absolute()
    while not _is_there(place):
        place = place.parent
    with tempfile.NamedTemporaryFile(dir=place, prefix=".loopwright-") as file:
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())  # some file systems say only now that they are full


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)  # also a link that leads nowhere is in the way
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
