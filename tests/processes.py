"""Warm worker processes: real ones, in one gloo group, that run the functions of a test module."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from .nursery import Child, nursery
from .ports import free_port

START_SECONDS = 90.0
WORKER = Path(__file__).parent / "worker.py"


class WorkerError(AssertionError):
    """A worker raised, died or did not answer; the text shows all of them."""


class WorkerPool:
    """Real processes in one gloo group.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder: Path | None = None
        self._processes: list[Child] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, folder: Path, timeout: float = 110.0) -> list[Any]:
        """Call a function with the same arguments in each process. Returns what they gave, process 0 first.

        Raises:
            WorkerError: one raised, died, or did not answer in time; the workers are started anew at the next call.
        """
        if not self._connections:
            self.close()  # of a start that failed
            self._start()
        request = (function.__code__.co_filename, function.__module__, function.__qualname__, args, str(folder))
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(request))  # not send: it would share tensors by file descriptors
        answers = self._collect(time.monotonic() + timeout)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        report = self._report(answers, timeout)
        self.close()
        raise WorkerError(report)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder)
        self._connections, self._processes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="workers-"))
        address = str(self._folder / "socket")
        port = free_port()
        with Listener(address, "AF_UNIX") as listener:
            for index in range(self.size):
                place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = os.environ | {key: str(value) for key, value in (place | meeting).items()}
                self._processes.append(nursery().start(WORKER, address, env=environment, log=self._log(index)))
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            try:
                connections = [listener.accept() for _ in range(self.size)]
            except TimeoutError as error:
                logs = "\n".join(self._log(index).read_text() for index in range(self.size))
                raise WorkerError(f"the workers did not start in {START_SECONDS:g} s:\n{logs}") from error
        self._connections = [found for _, found in sorted((each.recv(), each) for each in connections)]

    def _log(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"worker-{index}.log"

    def _collect(self, deadline: float) -> list[tuple[bool, Any] | None]:
        answers: list[tuple[bool, Any] | None] = [None] * self.size
        waiting = set(range(self.size))
        while waiting and time.monotonic() < deadline:
            for index in sorted(waiting):
                with contextlib.suppress(EOFError, ConnectionError):  # it died: the report says so
                    if not self._connections[index].poll(0.005):
                        continue
                    answers[index] = pickle.loads(self._connections[index].recv_bytes())
                waiting.discard(index)
            if any(answer is not None and not answer[0] for answer in answers):
                deadline = min(deadline, time.monotonic() + 10.0)  # the others have no reason to take longer
        return answers

    def _report(self, answers: list[tuple[bool, Any] | None], timeout: float) -> str:
        for process, answer in zip(self._processes, answers, strict=True):
            if answer is None and process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # its stacks go into its log
        time.sleep(0.5)
        parts = []
        for index, answer in enumerate(answers):
            log = self._log(index).read_text(errors="replace")[-6000:]
            if answer is None:
                code = self._processes[index].poll()
                state = f"gave no answer in {timeout:g} s" if code is None else f"ended with code {code}"
                parts.append(f"--- process {index} {state}:\n{log}")
            elif not answer[0]:
                parts.append(f"--- process {index} raised:\n{answer[1]}\n{log}")
            else:
                parts.append(f"--- process {index} returned")
        return "\n".join(parts)
