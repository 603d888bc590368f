"""Watching over the processes: where each stands, which one failed first, and who did not arrive.

A collective of torch that breaks says "Connection closed by peer", and one that waits in vain says "Timed out". What
has happened is known elsewhere: in the process that failed, or in the one that stands somewhere else. So each process
records where it is (`stand`, `collective`: plain assignments), and has a thread that looks at a list of notices in the
group's store twice a second. The main thread adds nothing to the store while all goes well.

What holds, with gloo, for processes that have joined by `group.connect`:

- **An exception** that ends one process, or that `leave_group_after` was given, ends all within 30 s. The others raise
  `PeerFailedError`, which shows the first failure with its process, place and traceback, when they next wait for that
  process; the watch wakes one that waits already after 5 s at the latest. As a last resort it ends the process, with
  that report on stderr and exit code 1: after 10 s in one collective, and after 20 s of anything else.
- **A process that is killed** says nothing. The others raise `PeerFailedError` with what is known: who does not answer,
  and where those stand that do.
- **A process that leaves in order**, or whose script ends, says so: who waits for a message of it raises
  `PeerFailedError` at once.
- **A backward pass of manual optimization that one process leaves out** ends all in about 5 s, see `divergence.py`.
- **A hang** ends when the group's timeout (`InitProcessGroupKwargs(timeout=...)`) is over, plus about 5 s: those that
  wait raise `CollectiveTimeoutError` with who never arrived, and for each process its place and its Python stack. The
  process that hangs is ended 20 s later, unless its launcher does so before.

A group that a script made itself is watched as well, but its connections aren't known: who waits in a collective of
torch is not woken, and the last resort serves. With NCCL collectives return before they are done, and torch's own
watchdog ends a process whose collective times out; what this package exchanges between processes travels over gloo or
through shared memory there too, and is watched as here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch.distributed as dist

from .board import Board
from .connections import Closable, Connections, port_of
from .errors import CollectiveTimeoutError, LoopwrightError, PeerFailedError
from .failures import Answer, Failure
from .outcomes import record_failure
from .positions import HERE, stand
from .uncaught import EndHooks
from .watcher import Watch, leave_group

__all__ = [
    "Failure",
    "announce_failure",
    "ask_all",
    "board_of_group",
    "collective",
    "connections_noted",
    "first_failure",
    "leave_group_after",
    "note_connection",
    "noted_connections",
    "stand",
    "start_watch",
    "stop_watch",
]


class _Current:
    """The watch over torch's default group, of which there is one per process."""

    watch: Watch | None = None
    hooks: EndHooks | None = None
    group: weakref.ref[dist.ProcessGroup] | None = None
    """Weak, since connections are closed when nobody holds the group any more."""
    connections = Connections()
    """Those of the group, where `noted_connections` was around its making."""


class collective:  # noqa: N801  (a context that reads like a function)
    """A context around a collective call, or around a wait for one, that says what its errors mean. Local.

    It records the operation for the reports of all processes, at the cost of a few assignments.

    Args:
        operation: what a reader calls it: `"gather"`.
        kind: `MEETING` or `AVERAGING` (`positions`), where the watch is to compare it with those of the others.
    Raises:
        PeerFailedError: torch's connection to another process broke.
        CollectiveTimeoutError: torch waited for another process in vain.
    """

    __slots__ = ("_kind", "_operation", "_outer")

    def __init__(self, operation: str, kind: str | None = None) -> None:
        self._operation = operation
        self._kind = kind

    def __enter__(self) -> None:
        self._outer = HERE.operation, HERE.kind
        HERE.operation, HERE.kind = self._operation, self._kind
        HERE.entries += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None and isinstance(error, RuntimeError) and not isinstance(error, LoopwrightError):
                _translate(self._operation, error)
        finally:
            HERE.operation, HERE.kind = self._outer


def _translate(operation: str, error: RuntimeError) -> None:
    watch = _Current.watch
    if watch is not None and (explained := watch.explain(operation, error)) is not None:
        raise explained from error


def announce_failure(error: BaseException) -> None:
    """Tell the other processes that this one is failing. Local; the first that is announced is the one they show.

    It returns when the others have read it, after 2 s at the latest. Without a group it does nothing.
    """
    if _Current.watch is not None:
        record_failure(error)
        _Current.watch.announce(error)


def leave_group_after(error: BaseException) -> bool:
    """Announce a failure, and leave the group unless all processes fail. Returns whether it was left. Local.

    For a process that goes on living after a failure: while it is in the group, others that are in a collective wait
    for it. When all fail within 3 s, as for an argument that is wrong everywhere, nobody waits and the group stays.
    """
    watch = _Current.watch
    if watch is None:
        return False
    if isinstance(error, PeerFailedError | CollectiveTimeoutError):
        watch.announce(error)
    elif watch.others_fail_alike(error):
        return False
    watch.close_connections()
    leave_group()
    return True


def first_failure() -> Failure | None:
    """What failed first, in whichever process; None as long as this process knows of nothing. Local."""
    return None if _Current.watch is None else _Current.watch.failure


def ask_all() -> dict[int, Answer]:
    """Where the processes of the group stand, by their indices; those that answer within a few seconds. Local."""
    return {} if _Current.watch is None else _Current.watch.ask()


@contextmanager
def noted_connections() -> Iterator[None]:
    """A context around the making of torch's default group, so that the watch can wake who waits in it. Local."""
    _Current.connections = Connections()
    with _Current.connections.noting():
        yield


def connections_noted() -> AbstractContextManager[None]:
    """A context around the making of one more group, whose connections end with those of the default one. Local."""
    return _Current.connections.noting()


def note_connection(connection: Closable) -> None:
    """Let the watch close this one together with those of torch's default group. Local."""
    _Current.connections.include(connection)


def start_watch(process_index: int, num_processes: int, timeout: timedelta | None = None) -> None:
    """Begin to watch over torch's default group, unless it is watched already. Local; all processes have to do it.

    Args:
        process_index: this process's index in the group.
        num_processes: how many are in it; one alone has nothing to watch.
        timeout: how long its collectives wait, for reports; torch's own messages name it in most cases.
    """
    group = dist.distributed_c10d._get_default_group()
    is_watched = _Current.group is not None and _Current.group() is group
    if is_watched or num_processes == 1:
        return
    stop_watch()
    store = dist.distributed_c10d._get_default_store()
    board, close = Board(store, process_index), partial(_Current.connections.close, port_of(store))
    _Current.watch = Watch(board, process_index, num_processes, close_connections=close, timeout=timeout)
    _Current.hooks = EndHooks(announce_failure, _end)
    _Current.group = weakref.ref(group)


def board_of_group(prefix: str) -> Board:
    """What the processes of torch's default group share beside the watch. Local; each of them makes one.

    Args:
        prefix: of its entries in the group's store.
    Raises:
        RuntimeError: whoever holds the store does not answer.
    """
    group = dist.distributed_c10d._get_default_group()
    if _Current.watch is not None and _Current.group is not None and _Current.group() is group:
        return _Current.watch.board_beside(prefix)  # opening another connection may take seconds
    return Board(dist.distributed_c10d._get_default_store(), dist.get_rank(), prefix)


def stop_watch() -> None:
    """Tell the others that this process leaves, and end what `start_watch` began. Local; nothing without a watch."""
    watch, hooks = _Current.watch, _Current.hooks
    _Current.watch = _Current.hooks = _Current.group = None
    if hooks is not None:
        hooks.remove()
    if watch is not None:
        watch.say_left()
        _Current.connections.leave()  # others may hold it: a model's wrapper, a message that nobody has read
        watch.stop()


def _end() -> None:
    """The interpreter ends: a thread that talks to a store must not be there any more then, nor one of gloo.

    Torch leaves gloo's threads alone at the end, and now and then one of them ends the process by SIGABRT.
    """
    watch = _Current.watch
    stop_watch()
    if watch is not None and dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        watch.close_connections()  # else leaving would wait for what is under way
        leave_group()
