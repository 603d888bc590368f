"""`SharedMemory`: control messages between the processes of one machine, through memory that all of them have open.

A process writes into its own part and reads those of the others, so that a message costs a copy and no thread of a
backend takes the cores that training needs.

**Buffers.** A process's part has one buffer for each of `2 * K` messages in a row, K being `MOST_UNDER_WAY`; the
message with number n goes into that of n - 2K. Nobody can be reading there any more: before a process sends a message
it has taken in the messages of all up to K before (`send` waits for that). So who sends n has message n - K of each
other process, and each of those had taken in all up to n - 2K before it sent that. Nobody waits for who waits for it:
the process that is furthest behind waits for messages that the others have sent already.

**Order.** Neither the interpreter nor the processor promises in which order the bytes of a message get visible. A
checksum over its number and its bytes tells a whole message from one that is still being written.

**Ends.** Each process holds a lock on one byte of the file as long as it lives and is in the group. The system lets go
of it when the process ends, however that happens, and so others know that nothing will come. The file has no name any
more once all have it open: nothing can be left behind.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import struct
import tempfile
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

MOST_UNDER_WAY = 4
"""Messages that a process may have sent without having taken in those of the others."""

_BUFFERS = 2 * MOST_UNDER_WAY
_HEADER = struct.Struct("=QII")  # a message's number from 1 on, its checksum, its bytes
_MEMORY_FOLDER = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# All in seconds.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
_LOOKS_AFTER = 0.02
"""Between two looks at whether the others are there."""

_logger = logging.getLogger(__name__)


class SharedMemory:
    """What one process has of the memory.

    Args:
        path: the file, of the size that `size_of` says.
        index: this process.
        count: of all processes.
        largest: bytes of the largest message.
        timeout: how long a process waits for others.
    Raises:
        OSError: the file can't be opened or locked here.
        ValueError: it is too small.
    """

    def __init__(self, path: str, index: int, count: int, largest: int, timeout: timedelta) -> None:
        self._index, self._count, self._timeout = index, count, timeout
        self._buffer_bytes = _HEADER.size + largest
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._memory = mmap.mmap(self._file, size_of(count, largest))
            # It ends with the first closing of the file in this process: nothing else may open it.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except BaseException:
            os.close(self._file)
            raise
        weakref.finalize(self, _release, self._memory, self._file).atexit = False
        self._is_closed = False
        self._number = 0
        self._under_way: deque[_Message] = deque()

    def send(self, message: bytes, size: int) -> Callable[[], list[bytes]]:
        """Send a message to all processes; waits only where too many are under way. Collective.

        Args:
            message: at most as long as the largest.
            size: not used; what other carriers send in its place.
        Returns:
            What gives the message of each process, process 0 first, and waits for them.
        Raises:
            RuntimeError: as torch's, in words that `watch.collective` knows: see `_wait`.
        """
        if len(self._under_way) == MOST_UNDER_WAY:
            self._take_in(self._under_way[0])
        if self._is_closed:
            raise _left([self._index])
        self._number += 1
        header = _HEADER.pack(self._number, zlib.crc32(message, self._number & 0xFFFFFFFF), len(message))
        start = self._start(self._index, self._number)
        self._memory[start : start + _HEADER.size + len(message)] = header + message
        sent = _Message(self, self._number, message)
        self._under_way.append(sent)
        return sent.receive

    def close(self) -> None:
        """Leave: whoever waits for this process gets an error, and so does this one. Local; from any thread."""
        if not self._is_closed:
            self._is_closed = True
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._index)

    def _take_in(self, message: _Message) -> None:
        """Take in what all have sent, up to a message."""
        while self._under_way and self._under_way[0].number <= message.number:
            first = self._under_way[0]
            first.parts = self._receive(first.number, first.own)
            self._under_way.popleft()

    def _receive(self, number: int, own: bytes) -> list[bytes]:
        parts = [own if index == self._index else self._look(index, number) for index in range(self._count)]
        return self._wait(parts, number) if None in parts else parts  # type: ignore[return-value]

    def _look(self, index: int, number: int) -> bytes | None:
        """A process's message; None where it is not there as a whole."""
        start = self._start(index, number)
        found, checksum, length = _HEADER.unpack_from(self._memory, start)
        if found < number:
            return None
        start += _HEADER.size
        message: bytes = self._memory[start : start + length]
        if zlib.crc32(message, found & 0xFFFFFFFF) != checksum:
            return None
        assert found == number, f"message {number} of process {index} was overwritten by {found}"
        return message

    def _wait(self, parts: list[bytes | None], number: int) -> list[bytes]:
        """Wait for the messages that are missing.

        The pauses grow with the time: others need the processor for what is waited for.

        Raises:
            RuntimeError: a process is gone ("closed by peer"), or the time is over ("timed out").
        """
        begin = time.monotonic()
        looks_at = begin + _LOOKS_AFTER
        while missing := [index for index, part in enumerate(parts) if part is None]:
            now = time.monotonic()
            time.sleep(min(max((now - begin) / 8, _SHORTEST_PAUSE), _LONGEST_PAUSE))
            gone = []
            if now >= looks_at:
                looks_at = now + _LOOKS_AFTER
                gone = [index for index in missing if self._is_gone(index)]
            for index in missing:  # after the look at who is gone, who may have sent it before
                parts[index] = self._look(index, number)
            if gone := [index for index in gone if parts[index] is None]:
                raise _left(gone)
            if None in parts and now - begin > self._timeout.total_seconds():
                self.close()  # what comes later has no meaning any more
                milliseconds = 1000 * self._timeout.total_seconds()
                raise RuntimeError(f"Timed out waiting {milliseconds:.0f}ms for processes {missing}")
        return [part for part in parts if part is not None]

    def _is_gone(self, index: int) -> bool:
        return self._is_closed or (index != self._index and not _is_locked(self._file, index))

    def _start(self, index: int, number: int) -> int:
        return (index * _BUFFERS + number % _BUFFERS) * self._buffer_bytes


class _Message:
    """A message on its way; keeps what was taken in until somebody wants it."""

    __slots__ = ("_memory", "number", "own", "parts")

    def __init__(self, memory: SharedMemory, number: int, own: bytes) -> None:
        self._memory = memory
        self.number = number
        self.own = own
        self.parts: list[bytes] | None = None

    def receive(self) -> list[bytes]:
        if self.parts is None:
            self._memory._take_in(self)
        assert self.parts is not None
        return self.parts


def open_shared(
    gather: Callable[[str], list[str]], index: int, *, node: int, largest: int, timeout: timedelta
) -> SharedMemory | None:
    """Memory that all processes share, None where they can't. Collective; all get the same answer.

    Args:
        gather: gives a text to every process; how they talk until then.
        index: this process.
        node: the index of its machine, as its launcher says.
        largest: bytes of the largest message.
        timeout: how long a process waits for others.
    """
    machines = gather(f"{_machine()} {node}")
    if len(set(machines)) > 1:
        return None
    made = _make(size_of(len(machines), largest)) if index == 0 else ""
    try:
        path = gather(made)[0]
        memory = _opened(path, index, len(machines), largest, timeout) if path else None
        have_all = all(gather("" if memory is None else "opened"))
    finally:
        if made:
            os.unlink(made)
    return memory if have_all else None


def size_of(count: int, largest: int) -> int:
    """Bytes that a number of processes need for messages of up to a number of bytes. Local."""
    return count * _BUFFERS * (_HEADER.size + largest)


def _machine() -> str:
    """What no other machine says: all that share memory have one system that runs."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _make(size: int) -> str:
    """The path of a new file that only this user can open; empty where there can be none."""
    folder = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
    try:
        file, path = tempfile.mkstemp(prefix="loopwright-", dir=folder)
    except OSError as error:
        _logger.debug("no memory is shared, control messages go through the backend: %s", error)
        return ""
    try:
        with open(file, "wb") as stream:
            stream.write(bytes(size))  # takes the room now: later its lack would end the process
    except OSError as error:
        _logger.debug("no memory is shared, control messages go through the backend: %s", error)
        os.unlink(path)
        return ""
    return path


def _opened(path: str, index: int, count: int, largest: int, timeout: timedelta) -> SharedMemory | None:
    try:
        return SharedMemory(path, index, count, largest, timeout)
    except (OSError, ValueError) as error:  # containers of their own, which may have another file there
        _logger.debug("no memory is shared, control messages go through the backend: %s", error)
        return None


def _release(memory: mmap.mmap, file: int) -> None:
    memory.close()
    os.close(file)


def _is_locked(file: int, index: int) -> bool:
    """Whether a process that lives has its byte."""
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, index)  # several may ask at the same time
    except OSError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, index)
    return False


def _left(indices: list[int]) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: the processes {indices} have left the shared memory")
