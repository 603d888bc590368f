"""Which files a run wrote itself, so that it touches no others."""

from __future__ import annotations

import warnings
from pathlib import Path

from ..distributed.paths import free_path


class OwnFiles:
    """The files that a run wrote. It replaces and removes none but those, and only in the folder that it writes to now.

    So what another run left in the same folder stays, and after a resume elsewhere so does the older folder.

    Args:
        owner: the callback's name, for warnings.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.paths: set[Path] = set()
        """Those that were written and not removed."""

    def has(self, path: Path | None, folder: Path) -> bool:
        """Whether this run wrote the file, into this folder."""
        return path in self.paths and path is not None and path.parent == folder

    def free_path(self, folder: Path, name: str) -> Path:
        """A path in the folder that no file has; `-v2` and so on is put behind a name that is taken."""
        path = free_path(folder / name, mark="-v")
        if path.name != name and folder / name not in self.paths:
            warnings.warn(
                f"{self._owner}: {str(folder / name)!r} is of another run; this one writes {path.name!r}.", stacklevel=2
            )
        return path

    def remove(self, path: Path, folder: Path, *, unlinks: bool = True) -> None:
        """Remove a file, if it is one of these; with `unlinks=False` another process removes it from the disk."""
        if self.has(path, folder):
            if unlinks:
                path.unlink(missing_ok=True)
            self.paths.discard(path)
