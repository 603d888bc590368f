"""Which files and folders a run wrote itself, so that it touches no others."""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from pathlib import Path

from ..distributed.atomic import remove_folder
from ..distributed.paths import free_path


class OwnFiles:
    """What a run wrote. It replaces and removes nothing but that, and only in the folder that it writes to now.

    So what another run left in the same folder stays, and after a resume elsewhere so does the older folder.

    Args:
        owner: the callback's name, for warnings.
        suffix: the end of the names that a number stands before; `""` for folders.
    """

    def __init__(self, owner: str, suffix: str) -> None:
        self._owner = owner
        self._suffix = suffix
        self.paths: set[Path] = set()
        """Those that were written and not removed."""
        self.left: dict[Path, int] = {}
        """Those of them that an earlier leg wrote after the checkpoint that this one goes on from, and their steps:
        they may be replaced."""

    def has(self, path: Path | None, folder: Path) -> bool:
        """Whether this run wrote it, into this folder."""
        return path in self.paths and path is not None and path.parent == folder

    def free_path(self, folder: Path, name: str, *, taken: Container[Path] = ()) -> Path:
        """A path in the folder that nothing has; `-v2` and so on is put behind a name that is taken.

        Args:
            folder: where.
            name: what it is to be called.
            taken: paths that something will have soon.
        """

        def is_taken(path: Path) -> bool:
            return path in taken or (path not in self.left and path.exists())

        path = free_path(folder / name, is_taken=is_taken, mark="-v", suffix=self._suffix)
        if path.name != name and folder / name not in self.paths and folder / name not in taken:
            warnings.warn(
                f"{self._owner}: {str(folder / name)!r} is there already, and stays; this run writes {path.name!r}.",
                stacklevel=2,
            )
        return path

    def add(self, path: Path) -> None:
        """Know that it was written now."""
        self.paths.add(path)
        self.left.pop(path, None)

    def take_over(self, left: Mapping[Path, int]) -> None:
        """Know what an earlier leg wrote after the checkpoint, and at which steps."""
        self.paths.update(left)
        self.left.update(left)

    def remove_left(self, folder: Path, step: int, *, unlinks: bool = True) -> None:
        """Remove what an earlier leg wrote up to this step, which the run has reached again."""
        for path in [path for path, written_at in self.left.items() if written_at <= step]:
            self.remove(path, folder, unlinks=unlinks)
            self.left.pop(path, None)

    def remove(self, path: Path, folder: Path, *, unlinks: bool = True) -> None:
        """Remove it if it is one of these; with `unlinks=False` another process removes it from the disk."""
        if self.has(path, folder):
            if unlinks and path.is_dir():
                remove_folder(path)
            elif unlinks:
                path.unlink(missing_ok=True)
            self.paths.discard(path)
