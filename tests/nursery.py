"""Python processes that start at once: forks of one that has torch and the package loaded, see tests/forking.py.

A child is not quite a program that was started: what Python and torch read of the environment when they load
(PYTHONHASHSEED, OMP_NUM_THREADS, TORCH_LOGS, ...) is the nursery's, and much has been imported already. A test of such
things, of the launcher, or of the start itself starts a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

SCRIPT = Path(__file__).parent / "forking.py"


class Child:
    """A process of the nursery, with what tests use of `subprocess.Popen`."""

    returncode: int | None = None
    """As that of `subprocess.Popen`: negative where a signal ended it."""

    def __init__(self, args: Sequence[str], connection: Connection, files: tuple[Path, Path]) -> None:
        self.args = args
        self._connection, self._files = connection, files
        self.pid: int = connection.recv()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not after this many seconds; with what it has written until then.
        """
        if self.returncode is None:
            if not self._connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self.texts())
            self.returncode = int(self._connection.recv())
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and self._connection.poll():
            self.wait()
        return self.returncode

    def texts(self) -> tuple[str, str]:
        """What it has written to its two streams until now."""
        output, errors = (file.read_text(errors="replace") for file in self._files)
        return output, errors

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written to its two streams, once it has ended. Raises as `wait` does."""
        self.wait(timeout)
        return self.texts()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks children, as those see it that ask for them."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nursery-"))  # the process removes it at its end
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # with more, NumPy starts threads when it loads
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self._folder)], stdin=theirs, env=environment
            )

    def start(
        self, script: Path | str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None,
        log: Path | None = None,
    ) -> Child:  # fmt: skip
        """Start a script as `python script arguments...` does, or with "-c" a program.

        Args:
            env: the child's environment; None: a copy of this process's.
            cwd: the folder it starts in; None: that of this process.
            log: a file for all that it writes; None: one for each stream, for `communicate`.
        """
        number = next(self._numbers)
        paths = (log, log) if log else (self._folder / f"{number}-out", self._folder / f"{number}-err")
        near, far = socket.socketpair()
        with far, paths[0].open("ab") as output, paths[1].open("ab") as errors:
            socket.send_fds(self._control, [b"1"], [far.fileno(), output.fileno(), errors.fileno()])
        connection = Connection(near.detach())
        argv = [str(script), *arguments]
        connection.send((argv, str(cwd or os.getcwd()), dict(os.environ if env is None else env)))
        return Child(argv, connection, paths)

    def run(
        self, script: Path | str, *arguments: str, timeout: float, env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a script to its end, as `subprocess.run` does."""
        child = self.start(script, *arguments, env=env, cwd=cwd)
        try:
            output, errors = child.communicate(timeout)
        finally:
            child.kill()
        return subprocess.CompletedProcess(child.args, child.wait(), output, errors)

    def close(self) -> None:
        """End it and its children."""
        self._control.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """That of this process, from its first use on."""
    made = Nursery()
    atexit.register(made.close)
    return made
