"""The other processes of a script that nobody launched: `Trainer(devices=2)` runs its own script again for each.

This process is process 0. The others run the same script with the same arguments and torchrun's variables, so that they
find their place. A thread watches them: when one dies, the others are ended, and this process ends as well, with a
message, if it has not by itself within a while: it may be waiting inside a collective, where no exception reaches it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from .errors import ConfigError, LaunchError, check_integer
from .group import has_joined, is_connected
from .launched import Place
from .outcomes import code_of, ending_of, exit_code_of
from .ports import LOOPBACK, free_port
from .surroundings import dies_with_parent
from .uncaught import EndHooks, end_at_once

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""How long a process that was asked to end may take before it is killed."""
NOTICE_SECONDS = 20.0
"""How long this process has to notice by itself that another one failed."""
MEETING_NOTICE_SECONDS = 3.0
"""The same while the processes have not met: waiting for the others to come can't be interrupted."""
PATIENCE_SECONDS = 60.0
"""How long this process waits in silence, when it has ended, for the others to end."""


class Peers:
    """The other processes of this run. Use `start_peers`.

    Args:
        commands: the program and arguments of each, process 1 first.
        environments: the variables of each.
        place: the place of this process.
        port: where the processes meet.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], place: Place, port: int
    ) -> None:
        self.place = place
        """This process's place: index 0."""
        self.init_method = f"tcp://{LOOPBACK}:{port}"
        """Where the processes meet, for `connect` in this process; the others have it in their variables."""
        self._failure: str | None = None
        self._exit_code = 1
        self._own_code: int | None = None
        self._is_closing = threading.Event()
        self._has_noticed = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        starting: Future[None] = Future()
        arguments = (commands, environments, starting)
        self._watcher = threading.Thread(target=self._run, args=arguments, name="loopwright-peers", daemon=True)
        self._watcher.start()
        starting.result()
        self._hooks = EndHooks(on_error=lambda error: self.terminate(), on_end=self._at_exit)

    def check(self) -> None:
        """Raise when another process has failed. Local.

        Raises:
            LaunchError: says which, and how.
        """
        if self._failure is not None:
            self._has_noticed.set()
            raise LaunchError(self._failure)

    def notice(self, error: BaseException | None = None) -> None:
        """Say that this process knows of a failure and is ending, however long that takes. Local.

        Args:
            error: what ends it; the code of an exit becomes that of the run, whatever becomes of the others.
        """
        if isinstance(error, SystemExit):
            self._own_code = code_of(error)
        self._has_noticed.set()

    def close(self) -> None:
        """Wait until the other processes have ended. Local; at the end of the script, which they go through as well.

        Raises:
            LaunchError: one of them failed.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._failure is None and any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                deadline = float("inf")
                print(f"Process 0 has ended, and waits for {self._running()}.", file=sys.stderr)
            time.sleep(POLL_SECONDS / 4)
        if self._failure is None:
            self._failure = self._find_failure()
        self._end()
        self.check()

    def terminate(self) -> None:
        """End the other processes: ask them to, and kill after a while those that don't. Local."""
        self._has_noticed.set()
        self._end()

    def _run(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], starting: Future[None]
    ) -> None:
        """The thread: start the processes and watch them.

        It lives as long as they do: to the system the thread that started a process is its parent, with whose end it
        ends. The thread that the Trainer was called in may be gone long before.
        """
        try:
            for command, environment in zip(commands, environments, strict=True):
                process = subprocess.Popen(command, env=dict(environment), preexec_fn=dies_with_parent())
                self._processes.append(process)
        except Exception as error:  # noqa: BLE001 - raised where the processes are wanted
            _end_all(self._processes)
            starting.set_exception(error)
            return
        starting.set_result(None)
        self._watch()

    def _watch(self) -> None:
        """Look at the processes until they have ended, or one has failed."""
        while not self._is_closing.wait(POLL_SECONDS):
            failure = self._find_failure()
            if failure is not None:
                self._failure = failure
                _end_all(self._processes)
                if not self._has_noticed.wait(NOTICE_SECONDS if is_connected() else MEETING_NOTICE_SECONDS):
                    self._give_up()
                return
            if all(process.poll() is not None for process in self._processes):
                return

    def _give_up(self) -> None:
        """End this process, which hangs: its peer is gone, and what it waits for can't be interrupted."""
        end_at_once(f"{self._failure} Process 0 was waiting for it, and is ended.", self._exit_code)

    def _find_failure(self) -> str | None:
        for index, process in enumerate(self._processes, start=1):
            code = process.poll()
            name = f"process {index} of {self.place.num_processes}"
            if code:
                self._exit_code = exit_code_of(code)
                return f"{name} failed ({ending_of(code)}); see its output above."
            if code == 0 and not has_joined():
                return f"{name} ended in order, but before it met the others: it never came to the Trainer's call."
        return None

    def _running(self) -> str:
        running = [(index, process) for index, process in enumerate(self._processes, 1) if process.poll() is None]
        return ", ".join(f"process {index} (pid {process.pid})" for index, process in running)

    def _end(self) -> None:
        """End the processes and the thread, and take the hooks back."""
        self._is_closing.set()
        _end_all(self._processes)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(POLL_SECONDS if self._failure is None else GRACE_SECONDS)
        self._hooks.remove()

    def _at_exit(self) -> None:
        """The script has come to its end, and the others have to as well; a failure of theirs is one of this run."""
        try:
            self.close()
        except LaunchError as error:
            if self._own_code is not None:
                end_at_once(f"process 0 ended first (exit code {self._own_code}).", self._own_code)
            end_at_once(str(error), self._exit_code)  # Python ignores what is raised here


def start_peers(num_processes: int) -> Peers:
    """Start the other processes of this script; each runs it again from its beginning. Local.

    Args:
        num_processes: how many there are then on this machine, this one included.
    Raises:
        ConfigError: this program can't be started again: it is a notebook, a console, a test, ...
    """
    check_integer("num_processes", num_processes, 2)
    command = script_command(num_processes)
    port = free_port()
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    environments = [{**shared, "RANK": str(index), "LOCAL_RANK": str(index)} for index in range(1, num_processes)]
    place = Place(num_processes=num_processes, local_num_processes=num_processes, launcher="torchrun")
    return Peers([command] * (num_processes - 1), environments, place, port)


def script_command(num_processes: int) -> list[str]:
    """The command that runs this program again. Local.

    Raises:
        ConfigError: it can't be run again.
    """
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    reason = _why_not(file)
    if reason is not None:
        raise ConfigError(
            f"{num_processes} processes are wanted, but this is {reason}, which can't be started again for each. Put "
            f"the code into a script and start it with `loopwright launch --num_processes {num_processes} script.py`, "
            f"or call `notebook_launcher(function, num_processes={num_processes})`."
        )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if spec is not None and spec.name != "__main__":
        return [sys.executable, *flags, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = os.path.dirname(str(file)) if spec is not None else str(file)
    return [sys.executable, *flags, os.path.abspath(script), *sys.argv[1:]]


def _why_not(file: str | None) -> str | None:
    """What this program is, if it is none that can be run again; else None."""
    if "_pytest" in sys.modules:
        return "a run of pytest"
    if "ipykernel" in sys.modules or hasattr(sys.modules["__main__"], "get_ipython"):
        return "a notebook or an IPython console"
    if multiprocessing.parent_process() is not None:
        return "a process that was started by another one"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "a Python console"
    if file is None or not os.path.exists(file):
        return "code without a file, such as that of `python -c`"
    return None


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that run to end, and kill after a while those that don't."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
