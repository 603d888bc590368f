"""`Connections`: the sockets that a process group opened, so that they can be closed under it.

A thread that waits in a collective of gloo wakes up in one way only: its connection ends. torch offers none to end it
from another thread, and leaving the group does not while a wrapper of a model still holds it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from torch.distributed.distributed_c10d import Store

_FOLDER = "/dev/fd"  # this process's open files, on Linux and macOS


class Closable(Protocol):
    """A connection between processes that is no socket."""

    def close(self) -> None:
        """End it, as often as one likes and from any thread; whoever waits on it, at either end, wakes."""


class Connections:
    """The sockets that were opened inside `noting`, and what else is included."""

    def __init__(self) -> None:
        self._found: set[tuple[int, int]] = set()
        self._others: WeakSet[Closable] = WeakSet()

    def include(self, connection: Closable) -> None:
        """Close this one as well, as long as somebody holds it. Local."""
        self._others.add(connection)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context; what it leaves open is noted."""
        before = _open_sockets()
        yield
        self._found |= _open_sockets() - before

    def leave(self) -> None:
        """End what was included: what was sent arrives all the same. Local; as often as one likes."""
        for other in list(self._others):
            other.close()

    def close(self, store_port: int | None) -> None:
        """End all connections, but those to the store. Local; whoever waits on one of them, at either end, wakes.

        The files stay open, since their owner will close them.

        Args:
            store_port: see `port_of`.
        """
        self.leave()
        for number, _ in self._found & _open_sockets():  # a number that means another file by now is left alone
            try:
                with socket.socket(fileno=os.dup(number)) as connection:
                    if _is_between_peers(connection, store_port):
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end or torch's own thread closed it meanwhile
                continue


def _open_sockets() -> set[tuple[int, int]]:
    """Number and identity of each open socket."""
    found = set()
    for name in os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ():
        try:
            state = os.fstat(int(name))
        except OSError:  # closed meanwhile: the listing's own file
            continue
        if stat.S_ISSOCK(state.st_mode):
            found.add((int(name), state.st_ino))
    return found


def _is_between_peers(connection: socket.socket, store_port: int | None) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ports = (connection.getsockname()[1], connection.getpeername()[1])
    except OSError:  # it listens, or was ended already
        return False
    return store_port not in ports


def port_of(store: Store) -> int | None:
    """Where the server of a store listens; None for a store without one. Local."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    port: int | None = getattr(store, "port", None)
    return port
