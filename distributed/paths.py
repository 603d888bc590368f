"""Names of files and folders."""

from __future__ import annotations

import itertools
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
