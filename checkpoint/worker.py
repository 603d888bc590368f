"""`Worker`: a thread that does one thing after another."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any


class Worker:
    """A thread that makes the calls it is given, in order, until it is closed. Local.

    The pools of the standard library take no more work once the main thread has ended; a save goes on then.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | threading.Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Have a call made. After one that failed no other is made."""
        self._calls.put(functools.partial(call, *args))

    def settle(self) -> None:
        """Return when all calls were made.

        Raises:
            Exception: what the first that failed has raised.
        """
        reached = threading.Event()
        self._calls.put(reached)
        reached.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, after the calls that it was given."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            if isinstance(given, threading.Event):
                given.set()
            elif self._error is None:
                try:
                    given()
                except Exception as error:  # noqa: BLE001  (raised by settle)
                    self._error = error
