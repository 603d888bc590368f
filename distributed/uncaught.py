"""How this process ends: noticing that its script does, by an exception that nobody catches or otherwise; ending it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType


class EndHooks:
    """Calls functions when the script ends, until it is removed.

    Python's own hook goes on working, and so do those of others that are installed before or after. A forked process
    inherits the hooks of its parent, which are silent there.

    Args:
        on_error: gets the exception that nobody caught, after its traceback was printed. It is not called for an exit.
        on_end: called when the interpreter ends, in every case.
    """

    def __init__(self, on_error: Callable[[BaseException], None], on_end: Callable[[], None]) -> None:
        self._on_error = on_error
        self._on_end = on_end
        self._process = os.getpid()
        self._previous = sys.excepthook
        self._hook = self._handle  # one object, so that it is recognised again
        sys.excepthook = self._hook
        atexit.register(self._end)

    def remove(self) -> None:
        """Put back what was there. Where another hook was put on top, this one stays below and does nothing."""
        self._process = -1
        atexit.unregister(self._end)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous

    def _handle(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous(kind, error, traceback)
        if os.getpid() == self._process:
            self._on_error(error)

    def _end(self) -> None:
        if os.getpid() == self._process:
            self._on_end()


def end_at_once(text: str, exit_code: int) -> None:
    """End this process, whatever it waits for, from any thread; says a text on stderr before.

    What was printed and logged is written out, where there is still somebody to read it: a closed pipe must not keep a
    process alive that is to end.
    """
    writes: Sequence[Callable[[], object]] = (
        lambda: print(text, file=sys.stderr),
        logging.shutdown,
        lambda: sys.stdout.flush(),
        lambda: sys.stderr.flush(),
    )
    for write in writes:
        with suppress(Exception):
            write()
    os._exit(exit_code)
