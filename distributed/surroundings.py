"""What starting processes changes in this one, and puts back: variables, signal handlers, log levels, folders."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .errors import ConfigError

_DEATH_SIGNAL = 1
"""Linux's number of prctl's option that names the signal a process gets when its parent dies."""


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which these variables are set; afterwards all variables are as before, those set inside as well."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update({name: text for name, text in before.items() if os.environ.get(name) != text})


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """A context after which the handlers of the signals that end a program are those from before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can change them
        return
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet_loggers(*, is_active: bool) -> Iterator[None]:
    """A context in which torch's launcher reports nothing by its loggers; what we report is one line."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)] if is_active else []
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def log_folder(given: str | None) -> Iterator[Path]:
    """The folder given, made where it is missing; else a temporary one that is removed afterwards.

    Raises:
        ConfigError: it can't be made.
    """
    with ExitStack() as stack:
        try:
            folder = Path(given or stack.enter_context(_temporary_folder()))
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            name = f"log_dir={given!r}" if given else "the folder for temporary files"
            raise ConfigError(f"{name} can't be used ({error}). Choose a folder that can be written.") from error
        yield folder


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="loopwright-", ignore_cleanup_errors=True)


@contextmanager
def no_leftovers() -> Iterator[None]:
    """A context after which no process group that was started inside is left, also where it was cut off by signals."""
    before = set(_children())
    try:
        yield
    finally:
        for child in set(_children()) - before:
            _kill_group(child)


def _children() -> list[int]:
    """The processes that this thread started, where the system tells; Linux does."""
    if not sys.platform.startswith("linux"):
        return []
    listing = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return [int(text) for text in listing.read_text().split()] if listing.is_file() else []


def _kill_group(child: int) -> None:
    """Kill a child with its group, if it leads one: those of torch's agent do, helpers of Python do not."""
    try:
        if os.getpgid(child) == child:
            os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself


_ENDING_WITH_LAUNCHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_DEATH_SIGNAL}, {int(signal.SIGTERM)})
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_launcher(command: Sequence[str]) -> list[str]:
    """A command that asks the system for SIGTERM when this thread dies, and then becomes the one given.

    For processes that others start for us: torch's agent, killed, would leave them behind. Where the system has no such
    signal it is the command given.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _ENDING_WITH_LAUNCHER, str(os.getpid()), *command]


def dies_with_parent() -> Callable[[], None] | None:
    """What a new process has to call first, so that the system ends it when this one dies; None where none does.

    Linux takes the thread that starts the process for this one: it has to stay.
    """
    if not sys.platform.startswith("linux"):
        return None
    set_option = ctypes.CDLL(None).prctl  # found here: after the fork it may not be looked for
    parent = os.getpid()

    def ask() -> None:
        set_option(_DEATH_SIGNAL, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before
            os._exit(1)

    return ask
