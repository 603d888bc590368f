"""How the processes that save one checkpoint agree: in the foreground by a collective, in the background by the store.

A stage of a save succeeds on all processes or on none: each does its part, all hear of all, and where one failed each
raises the same error.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..distributed import group, watch
from ..distributed.atomic import is_running
from ..distributed.board import Board
from ..distributed.errors import CheckpointError, LoopwrightError
from ..distributed.exchange import exchange

_POLL_SECONDS = 0.02
_PARTING_SECONDS = 10.0


class Meeting(Protocol):
    """A way for the processes to hear of each other."""

    @property
    def is_main(self) -> bool:
        """Whether this process makes the checkpoint's folder, and commits it."""

    @property
    def index(self) -> int:
        """This process's number."""

    @property
    def members(self) -> Sequence[int]:
        """Those that save this checkpoint, of all that are heard of."""

    def gather(self, value: Any, operation: str) -> list[Any]:
        """Every process's value, which JSON can hold, process 0 first."""


class ForegroundMeeting:
    """A meeting in the main thread.

    Args:
        members: the processes that save one checkpoint, the first of which makes its folder; others save one of their
            own at the same time. None: all of them.
    """

    def __init__(self, members: Sequence[int] | None = None) -> None:
        self.index = group.rank()
        self.members = range(group.world_size()) if members is None else members
        self.is_main = self.index == self.members[0]

    def gather(self, value: Any, operation: str) -> list[Any]:
        """Every process's value, on every process. Collective."""
        return exchange(value, operation)


class LoneMeeting:
    """No meeting: this process saves without the others, which may have failed."""

    is_main = True
    index = 0
    members = (0,)

    def gather(self, value: Any, operation: str) -> list[Any]:
        """This process's value. Local."""
        return [value]


class BackgroundMeeting:
    """A meeting beside the main thread, which may be in a collective meanwhile: it asks the group's store.

    Collective: every process makes it at the same place among its collectives, in the main thread.

    Args:
        timeout_seconds: how long it waits for another process.
    Raises:
        CheckpointError: on every process: the store is lost on one of them.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._round = 0
        self.index, self._count = group.rank(), group.world_size()
        self.members, self.is_main = range(self._count), self.index == 0
        self._board: Board | None = None
        if self._count > 1:
            try:
                self._processes = together(ForegroundMeeting(), "start_saving", self._open)
            except CheckpointError:
                if self._board is not None:
                    self._board.close()
                raise

    def _open(self) -> list[Any]:
        """Find what the processes share; gives where this one runs. Local."""
        try:
            self._board = watch.board_of_group("loopwright/save")
        except RuntimeError as error:
            raise _lost("start_saving", error) from error
        return [_machine(), os.getpid()]

    def gather(self, value: Any, operation: str) -> list[Any]:
        """Every process's value, on every process. Each of them has to ask, from any one thread.

        Raises:
            CheckpointError: another process failed, did not answer in time, or the store is lost.
        """
        if self._board is None:
            return [value]
        try:
            self._board.put(self._round, self.index, text=json.dumps(value))
            found = [self._wait_for(self._board, index, operation) for index in range(self._count)]
            self._board.count("read", self._round, by=1)
        except RuntimeError as error:
            if isinstance(error, LoopwrightError):
                raise
            raise _lost(operation, error) from error
        self._round += 1
        return [json.loads(text) for text in found]

    def close(self) -> None:
        """Remove what was put into the store; process 0 does it when all others have read it."""
        board, self._board = self._board, None
        if board is None:
            return
        end = time.monotonic() + _PARTING_SECONDS
        try:
            if self.index == 0:
                last = self._round - 1
                while last >= 0 and board.count("read", last) < self._count and time.monotonic() < end:
                    if not all(map(self._may_live, range(self._count))):
                        break  # nobody waits for what one that has died will not read
                    time.sleep(_POLL_SECONDS)
                for number in range(self._round):
                    board.remove("read", number)
                    for index in range(self._count):
                        board.remove(number, index)
        except RuntimeError:  # whoever held the store has ended: nothing is left to remove
            return
        finally:
            board.close()

    def _wait_for(self, board: Board, index: int, operation: str) -> str:
        end = time.monotonic() + self._timeout
        while (text := board.look_up(self._round, index)) is None:
            failure = watch.first_failure()
            if failure is not None:
                raise CheckpointError(f"{operation}: {failure.headline()}. Nothing was saved.")
            if not self._may_live(index) and board.look_up(self._round, index) is None:
                raise CheckpointError(f"{operation}: process {index} has ended. Nothing was saved.")
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{operation}: process {index} did not answer in {self._timeout:g} s. Nothing was saved."
                )
            time.sleep(_POLL_SECONDS)
        return text

    def _may_live(self, index: int) -> bool:
        """Whether a process lives, for all that can be known: of those on other machines, nothing."""
        machine, pid = self._processes[index]
        return machine != _machine() or is_running(pid)


def _lost(operation: str, error: RuntimeError) -> CheckpointError:
    text = str(error).partition("\n")[0]  # the rest are addresses in torch
    return CheckpointError(f"{operation}: the processes lost their store: {text}. Nothing was saved.")


def _machine() -> str:
    """A text that is the same for processes that see each other's numbers."""
    namespace, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
    parts = [str(namespace.stat().st_ino), boot.read_text().strip()] if namespace.exists() and boot.exists() else []
    return "/".join([socket.gethostname(), *parts])


def together(meeting: Meeting, operation: str, act: Callable[[], Any]) -> list[Any]:
    """What each member's part gave, on every process; an error of one is an error on all.

    Args:
        meeting: how they hear of each other.
        operation: what errors call it.
        act: this process's part. Gives what JSON can hold.
    Raises:
        CheckpointError: a part failed; says on which process, and why.
    """
    value, error = None, None
    try:
        value = act()
    except Exception as caught:  # noqa: BLE001  (raised on every process, after all were told)
        error = caught
    said = None if error is None else _text_of(error)
    outcomes = meeting.gather([said, value], operation)
    failures = {index: text for index, (text, _) in enumerate(outcomes) if text is not None}
    if failures:
        joined = _joined(failures, len(outcomes))
        if isinstance(error, CheckpointError) and str(error) == str(joined):
            raise error
        raise joined from error
    return [outcomes[index][1] for index in meeting.members]


def _text_of(error: Exception) -> str:
    if isinstance(error, LoopwrightError):
        return str(error)
    if isinstance(error, OSError):
        at = f" at {str(error.filename)!r}" if error.filename is not None else ""
        return f"the checkpoint can't be written: {error.strerror or error}{at}. No checkpoint was made."
    return f"{type(error).__name__}: {error}. No checkpoint was made."


def _joined(failures: dict[int, str], count: int) -> CheckpointError:
    texts = set(failures.values())
    if count == 1 or (len(failures) == count and len(texts) == 1):
        return CheckpointError(texts.pop())
    return CheckpointError("\n".join(f"process {index}: {text}" for index, text in failures.items()))
