"""Signals while a training goes on: it ends in order at a step boundary, on all processes."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..distributed.outcomes import record_failure
from .run import Run


@contextmanager
def ending_on_signals(run: Run) -> Iterator[None]:
    """A context in which SIGTERM, and the signals that callbacks name, ask the run for an orderly end, and out of which
    the process then exits.

    A second SIGTERM ends the process at once; the others may come again. Where the program has a handler of its own, it
    stays; so does everything outside the main thread, where Python takes no signals. Workers that are forked meanwhile
    act on none of them.

    Raises:
        SystemExit: with code 128 + the signal's number, when the run has ended for one, on this process or another.
    """
    received: list[str] = []
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        received.append(name)
        if run.signal is None:  # the first stands: after its warning SLURM sends SIGTERM, at the limit or to requeue
            run.note_signal(name)
        run.stop(f"{name}: the process was asked to end")

    numbers = _free_signals(run)
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
    if run.signal is not None:
        end = SystemExit(128 + signal.Signals[run.signal])
        if received:
            record_failure(end, f"{received[0]} asked it to end")  # the others followed
        raise end


def _free_signals(run: Run) -> list[signal.Signals]:
    """The signals that this run may take. Those which a callback asks for and nobody can serve are warned of."""
    asked = list(dict.fromkeys(name for callback in run.callbacks for name in callback.signals if name != "SIGTERM"))
    if threading.current_thread() is not threading.main_thread():
        if asked:
            warnings.warn(f"{', '.join(asked)}: not heard outside of the main thread.", stacklevel=3)
        return []
    numbers = {name: signal.Signals[name] for name in ["SIGTERM", *asked]}
    taken = [name for name in asked if signal.getsignal(numbers[name]) is not signal.SIG_DFL]
    if taken:
        warnings.warn(f"{', '.join(taken)}: the program has a handler of its own for it, which stays.", stacklevel=3)
    return [number for number in numbers.values() if signal.getsignal(number) is signal.SIG_DFL]
