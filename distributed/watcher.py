"""`Watch`: the thread that knows how the other processes of the group are, and tells them how this one is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .board import Board
from .divergence import Waiting, divergence
from .errors import CollectiveTimeoutError, DistributedError, PeerFailedError
from .failures import Answer, Failure
from .positions import HERE
from .reports import failure_report, last_report, loss_report, timeout_report, waited_seconds
from .uncaught import end_at_once

# All in seconds.
POLL = 0.5
"""Between two looks at the board."""
READING = 2.0
"""How long a failing process waits until all others have read of it."""
ANSWERING = 3.0
"""How long others have to say where they stand."""
EXAMINING = 6.0
"""How long a time-out takes to be reported by the process that saw it first."""
FAILING_ALIKE = 3.0
"""How long a failing process waits whether all others fail as well."""
WAITING = 6
"""Looks at the board for which a process has been in one collective before it tells the others."""
WAKING = 5.0
"""How long a process waits in one collective for one that failed, before its connections are closed."""
STUCK = 10.0
"""How long a process may stay in one collective after another one failed."""
UNAWARE = 20.0
"""How long a process may go on elsewhere after another one failed."""

_TIMEOUTS = ("timed out", "wait timeout", "socket timeout", "application timeout", "failed to pass monitoredbarrier")
_LOSSES = (
    "closed by peer", "reset by peer", "broken pipe", "connection refused", "socket closed", "remote process exited",
    "communicator was aborted", "connection was likely closed", "failed to recv", "has been destroyed",
)  # fmt: skip


class Watch:
    """What this process knows of the others; a daemon thread keeps it up to date.

    Args:
        board: what the processes share.
        index: this process.
        count: of all processes.
        close_connections: ends the group's connections, so that whoever waits in a collective gets an error.
        timeout: how long collectives wait, where torch's message does not say it.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        count: int,
        *,
        close_connections: Callable[[], None],
        timeout: timedelta | None = None,
    ) -> None:
        self.index = index
        self.count = count
        self.failure: Failure | None = None
        """The first that was announced; None again once every process has failed and knows it."""
        self.close_connections = close_connections
        self.is_failing = False
        """Whether this process has announced a failure of its own."""
        self._board = board
        self._timeout = timeout
        self._lock = threading.RLock()  # a signal handler may come while its own thread holds it
        self._is_store_lost = False
        self._failures: dict[int, Failure] = {}
        self._left: dict[int, str] = {}
        self._alarm = (-1, float("-inf"))  # the number of the last one, and when it was seen
        self._known_since = 0.0
        self._rounds: list[bool] = []  # for each time that all failed: whether the group is intact
        self._announced: BaseException | None = None  # the last, which must not count again in a later round
        self._rounds_before = 0  # how many had been when it was announced
        self._entries = 0
        self._entered_since = time.monotonic()
        self._num_looks = 0  # since then
        self._averagings_before = HERE.num_averagings
        self._waiting: dict[int, Waiting] = {}  # the last that each process told of
        self._divergence: str | None = None  # what this process waits in vain for
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loopwright-watch", daemon=True)
        self._thread.start()

    def board_beside(self, prefix: str) -> Board:
        """Another board of this process, over the watch's connection. Local.

        Raises:
            RuntimeError: whoever holds the store does not answer.
        """
        return self._board.beside(prefix)

    # What the thread does

    def _run(self) -> None:
        while not self._stopping.wait(POLL):
            self.look()
            self._end_if_stuck()
            self._end_if_apart()

    def look(self) -> None:
        """Read new notices and answer them. Local; from any thread, never waits for another process."""
        with self._lock:
            if self._is_store_lost:
                return
            try:
                for number, notice in self._board.read():
                    self._take(number, notice)
            except RuntimeError:  # the errors of stores; whoever held it has ended, in order or not
                self._is_store_lost = True

    def _take(self, number: int, notice: dict[str, Any]) -> None:
        if notice["kind"] == "alarm":
            self._alarm = (number, time.monotonic())
            self._board.put("answer", number, self.index, text=Answer.now(self.index).to_text())
            return
        if notice["kind"] == "failure":
            self._take_failure(Failure(**notice["failure"]))
        elif notice["kind"] == "waiting":
            waiting = Waiting(**notice["waiting"])
            self._waiting[waiting.index] = waiting
            return
        else:
            self._left[notice["index"]] = notice["place"]
        self._board.count("read", number, by=1)

    def _take_failure(self, failure: Failure) -> None:
        self._failures[failure.index] = failure
        if self.failure is None:
            self.failure, self._known_since = failure, time.monotonic()
        if len(self._failures) == self.count:
            self._rounds.append(not any(each.is_consequence for each in self._failures.values()))
            self._failures, self.failure, self.is_failing = {}, None, False

    def _end_if_stuck(self) -> None:
        """Wake a main thread that waits for a process which failed; where that is no use, end this process."""
        now = time.monotonic()
        if HERE.operation is None or HERE.entries != self._entries:
            self._entries, self._entered_since, self._num_looks = HERE.entries, now, 0
        failure = self.failure
        if failure is None:
            return
        known, inside = now - self._known_since, now - self._entered_since
        if min(known, inside) >= WAKING:
            self.close_connections()
        if min(known, inside) >= STUCK or (known >= UNAWARE and not self.is_failing):
            end_at_once(last_report(self.index, failure, known, Answer.now(self.index)), 1)

    def _end_if_apart(self) -> None:
        """Tell the others where this process waits, and wake it where one of them waits for it elsewhere.

        It counts looks instead of time: a process that was stopped for a while has waited for nobody.
        """
        self._num_looks += 1
        if self._num_looks < WAITING or HERE.kind is None or self.failure is not None:
            return
        own = Waiting.now(self.index, self._averagings_before)
        if self._num_looks == WAITING:
            self._post(kind="waiting", waiting=own.as_dict())
        found = [text for other in list(self._waiting.values()) if (text := divergence(own, other)) is not None]
        if found and HERE.entries == self._entries:
            self._divergence = found[0]
            self.close_connections()

    # What the main thread asks for

    def announce(self, error: BaseException) -> None:
        """Tell the others of a failure of this process, once; returns when they have read it, or won't. Local."""
        if not self.is_failing and self._announced is not error:
            self._post_failure(Failure.of(error, self.index), waits=True, error=error)

    def others_fail_alike(self, error: BaseException) -> bool:
        """Announce a failure, and wait whether all processes fail, so that none waits for another. Local."""
        end = time.monotonic() + FAILING_ALIKE
        if not self.is_failing and self._announced is not error:
            self._post_failure(Failure.of(error, self.index), waits=False, error=error)
        rounds = self._rounds_before
        self._wait(lambda: len(self._rounds) > rounds, end)
        self._announced = None  # it holds frames, and so what they hold
        return len(self._rounds) > rounds and self._rounds[rounds]

    def say_left(self) -> None:
        """Tell the others that this process leaves: its script ends, or it left the group in order. Local."""
        if self.is_failing:
            return
        number = self._post(kind="left", index=self.index, place=str(HERE))
        if self.index == 0 and number is not None:  # the store may end with this process
            self._wait(
                lambda: self._num_readers(number) + self._board.count("stopped") >= self.count,
                time.monotonic() + READING / 2,
            )

    def explain(self, operation: str, error: RuntimeError) -> DistributedError | None:
        """What an error of torch out of a collective means; None if it says nothing about other processes. Local."""
        text = str(error).lower()
        if self._divergence is not None:
            explained: DistributedError = DistributedError(self._divergence)
        elif any(words in text for words in _TIMEOUTS):
            explained = self._explain_timeout(operation, str(error))
        elif any(words in text for words in _LOSSES):
            explained = self._explain_loss(operation)
        else:
            return None
        if not self.is_failing:
            place = str(HERE)
            headline = str(explained) if isinstance(explained, CollectiveTimeoutError) else _first_line(explained)
            failure = Failure(self.index, place, type(explained).__name__, headline, "", time.time())
            self._post_failure(failure, waits=False)
        return explained

    def stop(self) -> None:
        """End the thread; process 0 waits a moment for the others to do so, since it may hold the store. Local."""
        try:
            if not self._is_store_lost:
                self._board.count("stopped", by=1)
                if self.index == 0:
                    self._wait(lambda: self._board.count("stopped") >= self.count, time.monotonic() + READING / 2)
        except RuntimeError:
            self._is_store_lost = True
        self._stopping.set()
        self._thread.join(2 * ANSWERING)
        with self._lock:
            self._is_store_lost, self._announced = True, None
            self._board.close()

    # How

    def _explain_timeout(self, operation: str, cause: str) -> DistributedError:
        self.look()
        if (failure := self.failure) is not None and not failure.is_consequence:
            return PeerFailedError(failure_report(operation, self.index, failure))
        answers = self.ask()
        if (failure := self.failure) is not None and not failure.is_consequence:
            return PeerFailedError(failure_report(operation, self.index, failure))
        waited = waited_seconds(cause, self._timeout)
        return CollectiveTimeoutError(timeout_report(operation, self.index, waited, answers, self.count, self._left))

    def _explain_loss(self, operation: str) -> DistributedError:
        self._wait(lambda: self.failure is not None or bool(self._left), time.monotonic() + ANSWERING / 2)
        if self.failure is None and self._is_alarm_recent():
            # gloo closes the connections of a process that timed out: that one says why.
            self._wait(lambda: self.failure is not None, time.monotonic() + EXAMINING)
        answers = self.ask() if self.failure is None else {}
        failure = self.failure
        if failure is None:
            lost = self._is_store_lost
            return PeerFailedError(loss_report(operation, self.index, answers, self.count, self._left, lost))
        kind = CollectiveTimeoutError if failure.kind == "CollectiveTimeoutError" else PeerFailedError
        return kind(failure_report(operation, self.index, failure))

    def ask(self) -> dict[int, Answer]:
        """Where the processes stand that answer within a few seconds, by their indices. Local."""
        number: int | None = self._alarm[0]
        if not self._is_alarm_recent():
            number = self._post(kind="alarm", index=self.index)
        answers: dict[int, Answer] = {}

        def have_all_answered() -> bool:
            for other in set(range(self.count)) - answers.keys() - self._left.keys():
                if (text := self._board.look_up("answer", number, other)) is not None:
                    answers[other] = Answer.of(text)
            return len(answers.keys() | self._left.keys()) == self.count

        self._wait(have_all_answered, time.monotonic() + ANSWERING)
        return answers

    def _is_alarm_recent(self) -> bool:
        return time.monotonic() - self._alarm[1] < ANSWERING

    def _post_failure(self, failure: Failure, *, waits: bool, error: BaseException | None = None) -> None:
        self.is_failing, self._announced = True, error
        rounds = self._rounds_before = len(self._rounds)
        number = self._post(kind="failure", failure=failure.as_dict())
        if waits and number is not None:
            self._wait(
                lambda: self._num_readers(number) >= self.count or len(self._rounds) > rounds,
                time.monotonic() + READING,
            )

    def _num_readers(self, number: int) -> int:
        return self._board.count("read", number)

    def _post(self, **notice: Any) -> int | None:
        """The number of the new notice, None where nobody can read it any more."""
        with self._lock:
            try:
                return None if self._is_store_lost else self._board.post(**notice)
            except RuntimeError:
                self._is_store_lost = True
                return None

    def _wait(self, is_done: Callable[[], bool], end: float) -> None:
        """Wait until something holds, the time is over, or nothing new can come."""
        while True:
            self.look()
            try:
                if self._is_store_lost or is_done():
                    return
            except RuntimeError:
                self._is_store_lost = True
                return
            if time.monotonic() >= end:
                return
            time.sleep(POLL / 10)


def leave_group() -> None:
    """Leave the default group without waiting for anyone. Local; the others' collectives fail."""
    if not dist.is_initialized():
        return
    if "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()  # destroying waits for what is in flight, which the dead never end
    else:
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
