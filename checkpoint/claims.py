"""`FolderClaim`: one living run at a time writes into a folder of checkpoints."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import warnings
import weakref
from pathlib import Path

from ..distributed.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE_NAME = ".claim"


class FolderClaim:
    """Holds a folder for a run, until `release` or the end of the process, however that comes. Local.

    The claim is the lock on a hidden file in the folder. What a killed process leaves of it holds nobody up, and
    processes that it forked have no part in it. For POSIX systems.

    Args:
        folder: made if it is missing, and removed again by `release` if nothing came into it.
        run_id: of the run, for the message to others.
    Raises:
        CheckpointError: another living run holds the folder; names its host and process.
        OSError: the folder can't be made or written to.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        """What is claimed."""
        self._made = _make(folder)
        try:
            self._descriptor: int | None = _acquire(folder, run_id)
        except BaseException:
            _remove_empty(self._made)
            raise
        # A forked worker shares the lock as long as it has the descriptor, and may live longer than this process.
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(own()))

    def release(self) -> None:
        """Let others have the folder. Does nothing the second time, nor in a forked process."""
        if self._descriptor is None:
            return
        try:
            (self.folder / FILE_NAME).unlink(missing_ok=True)  # while it is still held, so that it is this one's
        except OSError as error:  # it holds nobody up, as what a killed process leaves
            logger.warning("the claim on %r stays, as it can't be removed: %s", str(self.folder), error)
        finally:
            _leave(self)
        _remove_empty(self._made)


def _leave(claim: FolderClaim | None) -> None:
    if claim is not None and claim._descriptor is not None:
        os.close(claim._descriptor)
        claim._descriptor = None


def _acquire(folder: Path, run_id: str) -> int:
    path = folder / FILE_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"another run writes into {str(folder)!r}: {holder}. Each would take the other's checkpoints for its "
                "own. Wait until it has ended, or choose another folder."
            ) from None
        except OSError as error:
            warnings.warn(
                f"{str(folder)!r} is on a file system without locks ({error}): two runs that write into it are not "
                "noticed.",
                stacklevel=4,
            )
        if _is_at(path, descriptor):
            break
        os.close(descriptor)  # its holder removed it meanwhile
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "run": run_id}).encode(), 0)
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that others find at its path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 10_000, 0))
        return f"process {said['pid']} on {said['host']}, run {said['run']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has just begun"


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it. Returns the ones that were missing, the innermost first."""
    missing: list[Path] = []
    for place in (folder, *folder.parents):
        if place.exists():
            break
        missing.append(place)
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        if not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
