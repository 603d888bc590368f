"""Writing files and knowing their SHA-256: hashing, writing and flushing to the disk go on beside each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from .worker import Worker

_HASHED_BYTES = 8 * 2**20
_WRITTEN_BYTES = 2**20  # larger writes can be several times slower, where the system looks for large free pages
_SMALL_BYTES = 2**18
_READERS = 4


class FileEntry(NamedTuple):
    """What a manifest says of a file."""

    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""


class NewFiles:
    """Files that are being written. A context: at its end, all of them are on the disk. Local."""

    def __init__(self) -> None:
        self.entries: dict[Path, FileEntry] = {}
        """What a manifest says of each; after the end of the context."""
        self._files: list[HashedFile] = []
        self._stack = ExitStack()
        self._flusher: Worker | None = None

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            if error is not None:
                return
            if self._files:
                self._files[-1].flush()
            if self._flusher is not None:
                self._flusher.settle()
            self.entries = {file.path: file.entry() for file in self._files}

    def create(self, path: Path) -> HashedFile:
        """A new file, where there is none yet. The one before it is complete, and flushed meanwhile."""
        if self._files:
            if self._flusher is None:
                self._flusher = Worker("loopwright-flush")
                self._stack.callback(self._flusher.close)
            self._flusher.submit(self._files[-1].flush)
        file = HashedFile(path)
        self._stack.callback(file.close)
        self._files.append(file)
        return file

    def write_text(self, path: Path, text: str) -> None:
        """Write a small file."""
        self.create(path).write(text.encode())


class HashedFile:
    """A new file whose content is hashed by a thread while it is written. Made by `NewFiles`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = hashlib.sha256()
        self._size = 0
        self._hasher: Worker | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes, given as such. Their memory may change after `settle`, or after the end of the context."""
        view = memoryview(data)
        self._size += len(view)
        if self._hasher is None and len(view) > _SMALL_BYTES:
            self._hasher = Worker("loopwright-hash")
        for begin in range(0, len(view), _HASHED_BYTES):
            piece = view[begin : begin + _HASHED_BYTES]
            if self._hasher is None:
                self._hash.update(piece)
            else:
                self._hasher.submit(self._hash.update, piece)
            while piece:
                piece = piece[os.write(self._descriptor, piece[:_WRITTEN_BYTES]) :]

    def settle(self) -> None:
        """Return when all that was written is hashed."""
        if self._hasher is not None:
            self._hasher.settle()

    def flush(self) -> None:
        """Return when all that was written is on the disk."""
        os.fsync(self._descriptor)

    def entry(self) -> FileEntry:
        """What the manifest says of it."""
        self.settle()
        return FileEntry(self._size, self._hash.hexdigest())

    def close(self) -> None:
        """Close it, when nothing reads the given memory any more."""
        if self._hasher is not None:
            self._hasher.close()
        os.close(self._descriptor)


def find_damage(folder: Path, files: Mapping[str, FileEntry], *, reads: bool = True) -> list[str]:
    """What is wrong with files in a folder: for each its name, what was expected and what was found. Local.

    Args:
        folder: where they are.
        files: what they should be.
        reads: False compares sizes alone.
    Raises:
        OSError: one can't be read.
    """
    damage = {}
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            damage[name] = "no file" if path.exists() else "missing"
        elif (size := path.stat().st_size) != entry.size_bytes:
            damage[name] = f"expected {entry.size_bytes} bytes, found {size}"
    whole = [name for name in files if name not in damage]
    for name, found in zip(whole, _hashes([folder / name for name in whole]) if reads else [], strict=reads):
        if found != files[name].sha256:
            damage[name] = f"expected SHA-256 {files[name].sha256}, found {found}"
    return [f"{name}: {damage[name]}" for name in files if name in damage]


def _hashes(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="loopwright-hash") as pool:
        return list(pool.map(_hash_file, paths))


def _hash_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
