"""Files and folders that are written whole or not at all, whenever the process is killed.

What is being written stands in a temporary sibling, `.NAME.HOST-PID.partial`; it is flushed to the disk and renamed
when it is complete. What a killed process left behind is recognised by that name, and removed by the next writer of its
folder. For POSIX systems.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..distributed.errors import CheckpointError

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
    _flush_folder(target.parent)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A context that gives a new temporary folder to write into, and renames it to `path` at its end.

    When the body raises, the temporary folder is removed. Missing parent folders are made.

    Raises:
        CheckpointError: `path` exists; a folder can't be replaced in one step.
    """
    target = Path(path)
    if target.exists():
        raise CheckpointError(f"{str(target)!r} exists already. Choose another name, or remove it first.")
    temporary = _prepare(target)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                _flush(Path(folder, name))
            _flush_folder(Path(folder))
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    _flush_folder(target.parent)


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed processes of this machine left half-written in `folder`; gives what was removed.

    What a living process is writing stays, and so does what another machine wrote, since nothing here can tell whether
    its process lives.
    """
    leftovers = [entry for entry in Path(folder).iterdir() if _is_leftover(entry.name)] if Path(folder).is_dir() else []
    for entry in leftovers:
        _remove(entry)
    return leftovers


def is_partial(path: str | Path) -> bool:
    """Whether the name is that of something half-written."""
    return _PARTIAL.match(Path(path).name) is not None


def _prepare(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    temporary = target.with_name(f".{target.name}.{_HOST}-{os.getpid()}.partial")
    _remove(temporary)  # of an earlier process with this number, as after the restart of a container
    return temporary


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)  # another process may be removing it as well
    else:
        entry.unlink(missing_ok=True)


def _is_leftover(name: str) -> bool:
    match = _PARTIAL.match(name)
    return match is not None and match["host"] == _HOST and not _is_running(int(match["pid"]))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it lives and belongs to somebody else
    return True


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    """Without this a rename may be lost with the power, although the file's content was flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
