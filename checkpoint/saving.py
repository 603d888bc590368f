"""Saving a checkpoint: whole or not at all, by all processes together, at once or in the background.

The stages: every process packs its part, so that nothing is written unless everything can be; the main process looks
whether the path is free and the file system has room, and makes the temporary folder; every process writes its files;
the main process writes the manifest and renames the folder. A stage fails on all processes or on none, and after a
failure the folder is gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..distributed.atomic import PartialFolder, move_into
from ..distributed.errors import CheckpointError
from ..distributed.logger import get_logger
from .contents import Contents, PackedContents
from .finding import is_only_a_checkpoint, next_sequence
from .hashing import FileEntry, NewFiles
from .host_copies import HostCopies
from .manifest import FILE_NAME, Facts, make_manifest, manifest_text
from .meeting import BackgroundMeeting, ForegroundMeeting, LoneMeeting, Meeting, together
from .parts import Described
from .space import check_space
from .tensor_file import write_tensors

_logger = get_logger(__name__)
_TIMEOUT_SECONDS = 1800.0
_HEAD_START_SECONDS = 0.02
"""How long a save in the background leaves the interpreter to training, which can begin its next step meanwhile."""
_Folder = PartialFolder | str
"""Where all processes write: on the main process what can end it, elsewhere its path."""


def save_checkpoint(
    path: str | Path,
    contents: Contents,
    facts: Facts,
    *,
    alone: bool = False,
    replaces: bool = False,
    members: Sequence[int] | None = None,
) -> Path:
    """Save a checkpoint, whole or not at all. Collective, unless `alone`.

    Args:
        path: the folder that it will be, the same on all processes and on a file system that all of them see. Nothing
            may be there.
        contents: what this process puts into it; the tensors are not changed, and of each there is one copy at a time.
        facts: what its manifest says; those of the main process count.
        alone: the main process saves without the others, which may have failed.
        replaces: a checkpoint may be there, which is removed when this one is whole; nothing else may be in its folder.
        members: the processes that save this one, on a file system that they share, while others save one of their own;
            the first of them is its main process. None: all of them.
    Returns:
        The folder.
    Raises:
        CheckpointError: on every process: something is there already, a value can't be stored (its path and type), the
            file system is full or can't be written to. Nothing is left behind, and no other checkpoint was touched.
    """
    meeting: Meeting = LoneMeeting() if alone else ForegroundMeeting(members)
    packed, told = _pack(contents, facts, meeting)
    return _write(Path(path), packed, facts, _prepare(Path(path), packed, told, meeting, replaces), meeting)


class PendingSave:
    """A checkpoint that is being written in the background. Made by `start_saving`.

    A thread does it, for which the end of the program waits.
    """

    def __init__(self, path: Path, copies: HostCopies) -> None:
        self.path = path
        """The folder that it will be."""
        self.error: CheckpointError | None = None
        """Why it failed, once it did."""
        self.seconds = 0.0
        """How long it took from its start, once it has ended."""
        self._copies = copies
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not. Local."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the folder when it is there. Local.

        Raises:
            CheckpointError: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error
        return self.path

    def _start(self, packed: PackedContents, facts: Facts, folder: _Folder, meeting: BackgroundMeeting) -> None:
        began = time.monotonic()

        def work() -> None:
            time.sleep(_HEAD_START_SECONDS)
            try:
                _write(self.path, packed, facts, folder, meeting)
            except CheckpointError as error:
                self.error = error
            except Exception as error:  # noqa: BLE001  (kept for whoever waits)
                self.error = CheckpointError(f"{str(self.path)!r} could not be saved: {type(error).__name__}: {error}.")
                self.error.__cause__ = error
            finally:
                if self.error is not None:
                    _logger.error("the checkpoint %s could not be saved: %s", self.path, self.error)
                self.seconds = time.monotonic() - began
                meeting.close()

        self._thread = threading.Thread(target=work, name="loopwright-save")
        self._thread.start()


def start_saving(
    path: str | Path,
    contents: Contents,
    facts: Facts,
    *,
    previous: PendingSave | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> PendingSave:
    """Begin to save a checkpoint; returns when all tensors are copied to the host's memory. Collective.

    What can be known before is an error here, as for `save_checkpoint`. A failure of the writing itself is in the
    result, on every process.

    Args:
        path: as `save_checkpoint` takes it.
        contents: as `save_checkpoint` takes it; the tensors may change as soon as this returns.
        facts: as `save_checkpoint` takes it.
        previous: the save before this one. It is waited for, and its memory is used again.
        timeout_seconds: how long the processes' threads wait for each other.
    Raises:
        CheckpointError: on every process, as for `save_checkpoint`.
    """
    if previous is not None:
        _wait_for(previous)
    foreground = ForegroundMeeting()
    packed, told = _pack(contents, facts, foreground)
    folder = _prepare(Path(path), packed, told, foreground)
    pending = PendingSave(Path(path), HostCopies() if previous is None else previous._copies)
    try:
        together(foreground, "start_saving", lambda: pending._copies.replace(packed.tensor_groups()))
        meeting = BackgroundMeeting(timeout_seconds)
    except BaseException:
        _discard(folder)
        raise
    pending._start(packed, facts, folder, meeting)
    return pending


def _wait_for(previous: PendingSave) -> None:
    if previous.is_done:
        return
    began = time.monotonic()
    if previous._thread is not None:
        previous._thread.join()
    _logger.info(
        "waited %.1f s for the save of %s to end, before the next one began", time.monotonic() - began, previous.path
    )


class _Told(NamedTuple):
    """What processes say of their parts."""

    size_bytes: int
    """Of all of them together."""
    described: dict[int, dict[str, Described]]
    """For each of them the tensors of which it writes a part."""


def _pack(contents: Contents, facts: Facts, meeting: Meeting) -> tuple[PackedContents, _Told]:
    """This process's part, and what all say of theirs."""
    packed: list[PackedContents] = []

    def act() -> list[Any]:
        if meeting.is_main:
            manifest_text(make_manifest(facts, 0, {}))  # the facts can be stored as well
        packed.append(PackedContents(contents, meeting.index, is_main=meeting.is_main))
        return [packed[0].size_bytes, packed[0].file_names(), packed[0].described]

    parts = together(meeting, "save_checkpoint", act)
    names = [name for _, own, _ in parts for name in own]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(
            f"several processes write the same files: {', '.join(twice)}. Give each tree its own name."
        )
    described = {index: told for index, (_, _, told) in zip(meeting.members, parts, strict=True)}
    return packed[0], _Told(sum(size for size, *_ in parts), described)


def _prepare(path: Path, packed: PackedContents, told: _Told, meeting: Meeting, replaces: bool = False) -> _Folder:
    """The temporary folder: on the main process what can end it, elsewhere its path."""
    folder: list[PartialFolder] = []

    def act() -> list[Any]:
        if not meeting.is_main:
            return [str(path), None, "", {}]
        save = secrets.token_hex(8)
        twice = packed.add_indexes(told.described, save)
        check_space(path.parent, told.size_bytes)
        folder.append(PartialFolder(path, replaces=replaces and is_only_a_checkpoint(path)))
        return [str(path), str(folder[0].path), save, twice]

    try:
        places = together(meeting, "save_checkpoint", act)
        if len(paths := {str(own) for own, *_ in places}) > 1:
            raise CheckpointError(
                f"the processes save to different paths: {', '.join(sorted(paths))}. Give all of them the same one. "
                "Nothing was written."
            )
    except BaseException:
        for each in folder:
            each.discard()
        raise
    _, place, save, twice = places[0]
    packed.use_indexes(save, twice)
    return folder[0] if folder else str(place)


def _write(path: Path, packed: PackedContents, facts: Facts, folder: _Folder, meeting: Meeting) -> Path:
    try:
        place = Path(folder) if isinstance(folder, str) else folder.path
        written = together(meeting, "save_checkpoint", lambda: _write_files(place, packed))
        files = {name: FileEntry(*entry) for part in written for name, entry in part.items()}

        def commit() -> None:
            if isinstance(folder, PartialFolder):
                manifest = make_manifest(facts, next_sequence(folder.target.parent, facts), files)
                with NewFiles() as last:
                    last.write_text(place / FILE_NAME, manifest_text(manifest))
                folder.commit()

        together(meeting, "save_checkpoint", commit)
    except BaseException:
        _discard(folder)
        raise
    return path


def _write_files(place: Path, packed: PackedContents) -> dict[str, FileEntry]:
    if not place.is_dir():
        raise CheckpointError(
            f"the folder {str(place)!r}, which the main process has made, is not here. Save to a file system that all "
            "processes see."
        )
    with NewFiles() as files:
        for name, tensors, metadata in packed.tensor_files():  # the longest to hash begins first
            write_tensors(files.create(place / name), tensors, metadata)
        for name, text in packed.texts.items():
            files.write_text(place / name, text)
        for planned in packed.weights.values():
            planned.write(files, {name: place / name for name in planned.names()})
    if packed.files_beside is not None:
        move_into(packed.files_beside, place)
    return {path.name: entry for path, entry in files.entries.items()}


def _discard(folder: _Folder) -> None:
    if isinstance(folder, PartialFolder):
        folder.discard()
