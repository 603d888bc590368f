"""Comparing a checkpoint's files with their checksums on several processes, each of which reads a share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..distributed.errors import CheckpointError
from ..distributed.exchange import exchange
from ..distributed.group import rank, world_size
from .hashing import FileEntry, find_damage
from .manifest import FILE_NAME
from .meeting import ForegroundMeeting, together
from .reading import Checkpoint, damaged, manifest_of

T = TypeVar("T")

_CHOICE = "choose a checkpoint"
_OPERATION = "verify a checkpoint"


def find_damage_together(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint's files, as `Checkpoint.find_damage` says it. Collective: process 0 leads.

    Called in `led_by_first`, on process 0 alone: it tells the others which checkpoint it is.

    Raises:
        CheckpointError: a process does not see the checkpoint, or can't read a file; says which and why.
    """
    if world_size() == 1:
        return checkpoint.find_damage()
    exchange(str(checkpoint.path), _CHOICE)
    return verify_share(checkpoint.path)


def led_by_first(act: Callable[[], T]) -> T | None:
    """What a function gives on process 0, None on the others, which verify their shares meanwhile. Collective.

    Args:
        act: called on process 0 alone; it may call `find_damage_together`.
    Raises:
        CheckpointError: on process 0: `act` raised it. The others hear of it from process 0.
    """
    if world_size() == 1:
        return act()
    if rank() == 0:
        try:
            found = act()
        except CheckpointError:
            exchange(None, _CHOICE)
            raise
        exchange(None, _CHOICE)
        return found
    while (path := exchange(None, _CHOICE)[0]) is not None:
        try:
            verify_share(Path(path))
        except CheckpointError:
            continue  # process 0 has the same error, and says what becomes of it
    return None


def verify_share(folder: Path) -> list[str]:
    """Compare this process's share of a checkpoint's files with their checksums. Collective.

    Processes share the files as far as they see one folder: copies of it on the disks of several machines are each
    compared whole.

    Returns:
        What is wrong with the files of all shares.
    Raises:
        CheckpointError: on every process: one of them does not see the checkpoint, or can't read a file.
    """
    meeting = ForegroundMeeting()
    files: dict[str, FileEntry] = {}

    def look() -> list[int]:
        with _reading(folder):
            files.update(manifest_of(folder).files)
            return _identity(folder)

    def compare() -> list[str]:
        with _reading(folder):
            return find_damage(folder, share)

    seen = together(meeting, _OPERATION, look)
    members = [index for index, each in enumerate(seen) if each == seen[meeting.index]]
    share = share_of(files, members.index(meeting.index), len(members))
    found = together(meeting, _OPERATION, compare)
    several = any(each != seen[0] for each in seen)
    damage = {
        text: f"{text} (as process {index} sees it)" if several else text
        for index, texts in enumerate(found)
        for text in texts
    }
    return [damage[text] for text in sorted(damage)]


def check_together(folder: Path) -> None:
    """Compare a checkpoint's files with their checksums, each process a share of them. Collective.

    Raises:
        CheckpointError: on every process: it is damaged, or one of them does not see it, or can't read a file.
    """
    if damage := verify_share(folder):
        raise damaged(folder, damage)


def share_of(files: Mapping[str, FileEntry], index: int, count: int) -> dict[str, FileEntry]:
    """The files that one of `count` processes reads: each file is one process's, and all have about as many bytes."""
    shares: list[dict[str, FileEntry]] = [{} for _ in range(count)]
    loads = [0] * count
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        least = loads.index(min(loads))
        shares[least][name] = files[name]
        loads[least] += files[name].size_bytes
    return shares[index]


def _identity(folder: Path) -> list[int]:
    """Numbers that are the same for processes that see the same folder."""
    status = (folder / FILE_NAME).stat()
    return [status.st_ino, status.st_mtime_ns]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint {str(folder)!r} can't be read: {error}.") from error
