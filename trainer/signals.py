"""SIGTERM while a training goes on: it ends in order at a step boundary, on all processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..distributed.outcomes import record_failure
from .run import Run


@contextmanager
def ending_on_sigterm(run: Run) -> Iterator[None]:
    """A context in which SIGTERM asks the run for an orderly end, and out of which the process then exits.

    A second SIGTERM ends the process at once. Where the program has a handler of its own, it stays; so does everything
    outside the main thread, where Python takes no signals.

    Raises:
        SystemExit: with code 143, when the run has ended for the signal, on this process or another one.
    """
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        received.append(number)
        run.signal = "SIGTERM"
        run.stop("SIGTERM: the process was asked to end")

    if is_ours:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if run.signal is not None:
        end = SystemExit(128 + signal.SIGTERM)
        if received:
            record_failure(end, "SIGTERM asked it to end")  # the others followed
        raise end
