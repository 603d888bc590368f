"""`Board`: an ordered list of notices that all processes of a group read and write, in the group's store."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

# No operation of the board waits for another process; a store that does not answer for this long is lost.
PATIENCE = timedelta(seconds=5)
# On a busy machine torch now and then reaches a store in its second attempt alone, which it makes after 5 s.
REACHING = timedelta(seconds=30)
_PREFIX = "loopwright/watch"


class Board:
    """Notices in the one order that all processes see, and small values beside them.

    It talks over a connection of its own, where torch can open one: another thread may be waiting on the group's.

    Args:
        store: the store of the group.
        index: this process's index in the group.
        prefix: of its entries in the store, for boards that are used for something else.
        connection: that of another board; None: one of its own, which may take seconds.
    Raises:
        RuntimeError: whoever holds the store does not answer.
    """

    def __init__(self, store: Store, index: int, prefix: str = _PREFIX, *, connection: Store | None = None) -> None:
        self._host = store  # the process that holds it keeps it as long as others may ask
        self._index = index
        self._store = _connected_to(store) if connection is None else connection
        # A store may outlive a group. Every process has begun the same number of groups on it.
        self._prefix = f"{prefix}/{self._store.add(f'{prefix}/begun/{index}', 1)}"
        self._num_read = 0

    def beside(self, prefix: str) -> Board:
        """Another board of the same process, over the same connection. Local.

        Args:
            prefix: of its entries in the store.
        Raises:
            RuntimeError: whoever holds the store does not answer.
        """
        return Board(self._host, self._index, prefix, connection=self._store)

    def close(self) -> None:
        """Let go of the store, so that a later group does not find this one's entries at the same address. Local."""
        del self._host, self._store

    def post(self, **notice: Any) -> int:
        """Put a notice at the end of the list. Returns its number. Local."""
        text = json.dumps(notice)
        number = self._num_read
        # Compare and set, so that a process which dies on the way leaves no hole that readers would wait at.
        while self._store.compare_set(self._key("notice", number), "", text).decode() != text:
            number += 1
        return number

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """The notices that this process has not read yet, with their numbers. Local."""
        found = []
        while (text := self.look_up("notice", self._num_read)) is not None:
            found.append((self._num_read, json.loads(text)))
            self._num_read += 1
        return found

    def put(self, *key: object, text: str) -> None:
        """Store a value beside the notices. Local."""
        self._store.set(self._key(*key), text)

    def look_up(self, *key: object) -> str | None:
        """A stored value, None where there is none yet; never waits. Local."""
        name = self._key(*key)
        return self._store.get(name).decode() if self._store.check([name]) else None

    def count(self, *key: object, by: int = 0) -> int:
        """A counter, after adding to it. Local."""
        return int(self._store.add(self._key(*key), by))

    def remove(self, *key: object) -> None:
        """Remove a stored value or a counter, if it is there. Local."""
        self._store.delete_key(self._key(*key))

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])


def _connected_to(store: Store) -> Store:
    """A connection of its own to the same store, where torch can open one."""
    if (clone := getattr(store, "clone", None)) is None:  # the oldest versions of torch
        return store
    known: Any = store  # torch's types leave this attribute out
    waits = known.timeout
    store.set_timeout(REACHING)  # the new connection takes it over, also for trying to reach one that has died
    try:
        connection: Store = clone()
    finally:
        store.set_timeout(waits)
    connection.set_timeout(PATIENCE)
    return connection
