"""Files that are written whole or not at all, whenever the process is killed.

What is being written stands in a temporary sibling, `.NAME.HOST-PID.partial`; it is flushed to the disk and renamed
when it is complete. What a killed process left behind is recognised by that name, and removed by the next writer in its
folder. For POSIX systems.
"""

from __future__ import annotations

import os
import re
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


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed processes of this machine left half-written in `folder`; gives what was removed.

    What a living process is writing stays, and so does what another machine wrote, since nothing here can tell whether
    its process lives.
    """
    if not Path(folder).is_dir():
        return []
    leftovers = [file for file in Path(folder).iterdir() if _is_leftover(file.name) and file.is_file()]
    for file in leftovers:
        file.unlink(missing_ok=True)  # another process may be removing it as well
    return leftovers


def _prepare(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    temporary = target.with_name(f".{target.name}.{_HOST}-{os.getpid()}.partial")
    temporary.unlink(missing_ok=True)  # of an earlier process with this number, as after the restart of a container
    return temporary


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
