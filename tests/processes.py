"""Warm worker processes: real ones, in one gloo group, that run functions of test modules for the whole session.

Run as a script this is the worker. A worker finds the function again by its file, so that tests need not be importable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

START_SECONDS = 90.0


class WorkerError(AssertionError):
    """A worker raised, died or did not answer; the text shows all of them."""


class WorkerPool:
    """Real processes in one gloo group.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="workers-"))
        self._processes: list[subprocess.Popen[bytes]] = []
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
        self._connections, self._processes = [], []

    def _start(self) -> None:
        address = str(self._folder / f"socket-{time.monotonic_ns()}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with Listener(address, "AF_UNIX") as listener:
            for index in range(self.size):
                place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = os.environ | {key: str(value) for key, value in (place | meeting).items()}
                with self._log(index).open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-P", __file__, address], env=environment, stdout=log, stderr=log,
                            stdin=subprocess.DEVNULL,
                        )
                    )  # fmt: skip
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            try:
                connections = [listener.accept() for _ in range(self.size)]
            except TimeoutError as error:
                logs = "\n".join(self._log(index).read_text() for index in range(self.size))
                raise WorkerError(f"the workers did not start in {START_SECONDS:g} s:\n{logs}") from error
        self._connections = [found for _, found in sorted((each.recv(), each) for each in connections)]

    def _log(self, index: int) -> Path:
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


def _load(file: str, module_name: str) -> Any:
    """The module of a file under the name that it has in the test process, so that its classes can be unpickled."""
    folder = Path(__file__).parent
    if folder.name not in sys.modules:
        # A package of its own: with the root on the path, its folders would be packages as well.
        package = types.ModuleType(folder.name)
        package.__path__ = [str(folder)]
        sys.modules[folder.name] = package
    if module_name.startswith(f"{folder.name}."):
        return importlib.import_module(module_name)
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def _serve(address: str) -> None:
    """Answer requests until the connection is closed."""
    import torch
    import torch.distributed as dist

    from loopwright.distributed.process import ProcessState
    from loopwright.distributed.random import set_seed

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    state = ProcessState(cpu=True)
    with Client(address, "AF_UNIX") as connection:
        connection.send(state.process_index)
        while True:
            try:
                file, module_name, qualname, args, folder = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            set_seed(0)
            os.chdir(folder)
            try:
                function = _load(file, module_name)
                for part in qualname.split("."):
                    function = getattr(function, part)
                answer = (True, function(*args))
                dist.barrier()
            except BaseException:  # noqa: BLE001 - told to the test
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(sys.argv[1])
