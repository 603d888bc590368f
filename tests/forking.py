"""The script of tests/nursery.py: a process that has torch and the package loaded, and forks itself.

It computes nothing and starts no thread, so that a fork is as good as a process that was started. It ends with the
process that started it, however that ends, and kills its children then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import types
from multiprocessing.connection import Connection
from pathlib import Path

MODULES = (
    "numpy", "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "loopwright.cli.main", "loopwright.trainer.accelerator",
    "loopwright.trainer.trainer", "loopwright.strategies.ddp", "loopwright.strategies.fsdp",
)  # fmt: skip


def _serve(control: socket.socket, folder: str) -> tuple[list[str], str, dict[str, str]]:
    """Fork a child for each request, and tell of its end. Returns in each child, with what it is to run."""
    running: dict[int, Connection] = {}
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            os.read(awake, 512)
            _report(running)
        if control not in ready:
            continue
        _, files, _, _ = socket.recv_fds(control, 1, 3)
        if not files:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        connection = Connection(files[0])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            request: tuple[list[str], str, dict[str, str]] = connection.recv()
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[1:])):
                os.dup2(file, number)
                os.close(file)
            for each in (connection, *running.values()):
                each.close()
            control.close()
            os.close(awake)
            os.close(wake)
            return request
        os.close(files[1])
        os.close(files[2])
        running[pid] = connection
        connection.send(pid)


def _report(running: dict[int, Connection]) -> None:
    """Tell of the children that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):  # nobody wants to know
            connection.send(os.waitstatus_to_exitcode(status))


def _become(argv: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run a script, or `-c` and a program, as the main module of this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["numpy"].random.seed()  # what the nursery has drawn is the same in all children
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-c":
        source: str | bytes = argv.pop(1)
        name, place = "<string>", ""
    else:
        name, source = argv[0], Path(argv[0]).read_bytes()
        place, main.__file__ = str(Path(name).resolve().parent), str(Path(name).absolute())
    sys.argv = argv
    sys.path.insert(0, place)
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose folders have the names of packages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a child leave alone what it shares with the nursery
    _become(*_serve(socket.socket(fileno=os.dup(0)), sys.argv[1]))
