"""Files and folders that are written whole or not at all, whenever the process is killed.

What is being written stands in a temporary sibling, `.NAME.HOST-PID.partial`; it is flushed to the disk and renamed
when it is complete. What a killed process left behind is recognised by that name, and removed by the next writer in its
folder. For POSIX systems.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError

_PARTIAL = re.compile(r"^\..+\.(?P<host>[^.]+)-(?P<pid>\d+)\.partial$")
_HOST = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A context that gives a temporary path to write one file to, and renames it to `path` at its end.

    An older file at `path` stays until then, and stays when the body raises; the temporary file is then removed.
    Missing folders are made.

    Raises:
        CheckpointError: the body wrote no file.
    """
    target = Path(path)
    temporary = _prepare(target)
    _remove(temporary)  # of an earlier process with this number, as after the restart of a container
    try:
        yield temporary
        if not temporary.is_file():
            raise CheckpointError(
                f"nothing was written for {str(target)!r}. Write one file to the path that this gives."
            )
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(target.parent)


class PartialFolder:
    """A folder that is being written, beside where it will stand. `commit` or `discard` ends it. Local.

    Several processes may write into it; one of them makes it and ends it. Each file in it has to be flushed already.

    Args:
        path: where it will stand. Missing folders above it are made.
        replaces: take the place of a folder that stands there, which is removed when this one is whole.
    Raises:
        CheckpointError: something stands there already, other than an empty folder.
    """

    def __init__(self, path: str | Path, *, replaces: bool = False) -> None:
        self.target = Path(path).absolute()  # the program's folder may change meanwhile
        self._replaces = replaces
        self._check_free()
        self.path = _prepare(self.target)
        """Where to write until then."""
        _remove(self.path)
        self.path.mkdir()

    def commit(self) -> Path:
        """Put it where it belongs, and return that.

        Raises:
            CheckpointError: something stands there by now.
        """
        self._check_free()
        _flush(self.path)
        if self._replaces and self.target.is_dir():
            _exchange(self.path, self.target)
        else:
            os.rename(self.path, self.target)
        _flush(self.target.parent)
        _remove(self.path)  # what it has replaced
        return self.target

    def discard(self) -> None:
        """Remove it, with what was written into it; does nothing when it is gone."""
        _remove(self.path)

    def _check_free(self) -> None:
        if self._replaces and self.target.is_dir() and not self.target.is_symlink():
            return
        if os.path.lexists(self.target) and not _is_empty_folder(self.target):
            raise CheckpointError(
                f"{str(self.target)!r} exists already, and nothing that exists is overwritten. Choose another path, or "
                "remove it."
            )


def move_into(folder: Path, place: Path) -> None:
    """Move all that is in a folder into another one of the same file system, flushed to the disk. Local.

    Raises:
        CheckpointError: something of that name is there already.
    """
    for entry in sorted(folder.iterdir()):
        if os.path.lexists(place / entry.name):
            raise CheckpointError(f"{entry.name!r} is a file of the checkpoint itself. Choose another name.")
        for part in [entry, *entry.rglob("*")] if entry.is_dir() else [entry]:
            _flush(part)
        os.rename(entry, place / entry.name)


def remove_folder(path: str | Path) -> None:
    """Remove a folder, so that it is whole or gone whenever the process is killed. Does nothing without one. Local."""
    target = Path(path)
    aside = _temporary(target.with_name(f"{target.name}.removed"))
    _remove(aside)
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return
    _remove(aside)


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed processes of this machine left half-written in `folder`; gives what was removed.

    What a living process is writing stays, and so does what another machine wrote, since nothing here can tell whether
    its process lives.
    """
    if not Path(folder).is_dir():
        return []
    leftovers = [entry for entry in Path(folder).iterdir() if _is_leftover(entry.name)]
    for entry in leftovers:
        _remove(entry)
    return leftovers


def _prepare(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    return _temporary(target)


def _exchange(folder: Path, other: Path) -> None:
    """Let two folders change places, at one moment where the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is None or rename(here, os.fsencode(folder), here, os.fsencode(other), exchange) != 0:
        _exchange_in_turn(folder, other)


def _exchange_in_turn(folder: Path, other: Path) -> None:
    """In between, the older one stands beside its place, under a name that nothing sweeps."""
    aside = other.with_name(f"{other.name}.replaced")
    if os.path.lexists(aside):
        raise CheckpointError(
            f"{str(aside)!r} is in the way: {str(other)!r} goes there for a moment when it is replaced. Remove it, or "
            "move it away."
        )
    os.rename(other, aside)
    os.rename(folder, other)
    os.rename(aside, folder)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{_HOST}-{os.getpid()}.partial")


def _remove(path: Path) -> None:
    """Another process may be removing it as well."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_leftover(name: str) -> bool:
    match = _PARTIAL.match(name)
    return match is not None and match["host"] == _HOST and not is_running(int(match["pid"]))


def is_running(pid: int) -> bool:
    """Whether there is a process of this number on this machine. Local."""
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it lives and belongs to somebody else
    return True


def _flush(path: Path) -> None:
    """For folders too: a rename may else be lost with the power, although the file's content was flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
