"""Starting the processes of a run on this machine, by torch's elastic agent, and saying which of them failed first."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import ConfigError, LaunchError, check_integer, check_number
from .outcomes import Outcome, first_cause, signal_outcome
from .ports import DEFAULT_PORT, LOOPBACK, check_host, check_port
from .surroundings import (
    changed_environment,
    ending_with_launcher,
    kept_signal_handlers,
    log_folder,
    no_leftovers,
    quiet_loggers,
)

TEE_WORDS = {"0": 0, "1": 1, "2": 2, "3": 3}
"""What of each process is written to its log file as well: nothing, its output, its errors, both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """How many processes are started, where they meet, and what happens when one fails."""

    num_processes: int = 1
    """Processes on all machines together, the same number on each."""
    num_machines: int = 1
    """Machines that take part; each runs its own launcher."""
    machine_rank: int = 0
    """This machine's index."""
    main_process_ip: str | None = None
    """The address of machine 0; needed with several machines."""
    main_process_port: int = 0
    """The port of machine 0 where all meet; 0: a free one, or 29500 with several machines."""
    rdzv_backend: str = "static"
    """torch's word for how the launchers meet: `"static"`, `"c10d"`, `"etcd-v2"`, ..."""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """Options of that way to meet, such as `timeout` in seconds."""
    max_restarts: int = 0
    """How often all processes are started again after one failed."""
    monitor_interval: float = 0.1
    """Seconds between two looks at the processes."""
    role: str = "default"
    """torch's name for this kind of process."""
    tee: str = "0"
    """Which streams also go to a file per process: `"0"` none, `"1"` output, `"2"` errors, `"3"` both."""
    log_dir: str | None = None
    """The folder of these files; None: a temporary one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the processes that are started."""
    shows_reports: bool = False
    """Whether torch's own reports on starting and ending are shown."""

    def __post_init__(self) -> None:
        check_integer("num_processes", self.num_processes, 1)
        check_integer("num_machines", self.num_machines, 1)
        check_integer("machine_rank", self.machine_rank, 0)
        check_integer("max_restarts", self.max_restarts, 0)
        check_number("monitor_interval", self.monitor_interval, above=0, allows_infinity=False, hint="Its unit is 1 s.")
        if self.machine_rank >= self.num_machines:
            raise ConfigError(
                f"machine_rank={self.machine_rank} with num_machines={self.num_machines}. Expected an index from 0 to "
                f"{self.num_machines - 1}."
            )
        if self.num_processes % self.num_machines:
            raise ConfigError(
                f"num_processes={self.num_processes} can't be shared evenly by num_machines={self.num_machines}. It "
                "counts the processes of all machines together."
            )
        if self.num_machines > 1 and not self.main_process_ip:
            raise ConfigError(
                f"num_machines={self.num_machines} needs main_process_ip, the address of machine 0, on all of them."
            )
        if not 0 <= self.main_process_port < 65536:
            raise ConfigError(f"main_process_port={self.main_process_port}. Expected 0, a free one, to 65535.")
        if self.tee not in TEE_WORDS:
            raise ConfigError(f"tee={self.tee!r}. Expected 0 (nothing), 1 (output), 2 (errors) or 3 (both).")

    @property
    def processes_here(self) -> int:
        """Processes on this machine."""
        return self.num_processes // self.num_machines


def run_command(settings: LaunchSettings, command: Sequence[str]) -> Outcome:
    """Run a command in each process of this machine, and say how it ended. Local.

    Args:
        settings: how many processes, and where they meet.
        command: the program and its arguments.
    Raises:
        ConfigError: the port is in use.
        LaunchError: the launchers of the machines don't meet.
    """
    program, *arguments = ending_with_launcher(command)
    return _run_agent(settings, program, arguments, start_method="spawn")


def run_function(settings: LaunchSettings, function: Callable[..., object], args: Sequence[Any]) -> None:
    """Run a function in each process of this machine, each a fork of this one. Local.

    Args:
        settings: how many processes, and where they meet.
        function: need not be picklable; what it returns is dropped.
        args: its arguments.
    Raises:
        ConfigError: the port is in use.
        LaunchError: a process failed; the text has its index and its traceback.
    """
    outcome = _run_agent(settings, _InFork(function, settings.environment), list(args), start_method="fork")
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.exit_code:
        raise LaunchError("\n\n".join(filter(None, (outcome.text, outcome.traceback))))


class _InFork:
    """A function as a fork of this process calls it."""

    def __init__(self, function: Callable[..., object], environment: Mapping[str, str]) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._environment = environment

    def __call__(self, *args: Any) -> None:
        os.environ.update(self._environment)
        torch.set_num_threads(1)  # a fork lacks the parent's threads, and waits for them for ever
        self._function(*args)


def _run_agent(
    settings: LaunchSettings, entry: str | Callable[..., object], args: list[Any], *, start_method: str
) -> Outcome:
    if not torch.distributed.is_available():
        raise LaunchError("this torch was built without torch.distributed, which starts processes. Install another.")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    variables = {**settings.environment, **_threads(settings)} if isinstance(entry, str) else {}
    with (
        changed_environment(variables),
        kept_signal_handlers(),
        quiet_loggers(is_active=not settings.shows_reports),
        log_folder(settings.log_dir) as folder,
    ):
        logs = DefaultLogsSpecs(log_dir=str(folder), tee=Std(TEE_WORDS[settings.tee]))
        agent = elastic_launch(_configuration(settings, logs, start_method), entry)
        try:
            with no_leftovers():
                agent(*args)
        except ChildFailedError as error:
            return first_cause(error.failures, settings.num_processes)
        except SignalException as error:
            return signal_outcome(error.sigval)
        except (RuntimeError, OSError, ValueError, ImportError) as error:  # the last two: what the rendezvous lacks
            raise LaunchError(f"the processes could not be started: {error}") from error
    return Outcome(exit_code=0)


def _configuration(settings: LaunchSettings, logs: Any, start_method: str) -> Any:
    """What the agent of torch needs to know."""
    from torch.distributed.launcher.api import LaunchConfig

    is_alone = settings.num_machines == 1
    host = settings.main_process_ip or LOOPBACK
    port = settings.main_process_port or (0 if is_alone else DEFAULT_PORT)
    if port and settings.machine_rank == 0:
        check_port(port)
    backend = settings.rdzv_backend
    if backend in ("static", "c10d") and "is_host" not in settings.rdzv_conf:
        check_host(host, is_here=is_alone)
    options: dict[str, Any] = dict(settings.rdzv_conf)
    if backend == "static":
        options["rank"] = settings.machine_rank
    if is_alone and backend == "static":
        backend = "c10d"  # its store takes a free port by itself, so that nothing can come between
        del options["rank"]
    return LaunchConfig(
        min_nodes=settings.num_machines,
        max_nodes=settings.num_machines,
        nproc_per_node=settings.processes_here,
        logs_specs=logs,
        run_id=uuid.uuid4().hex if is_alone else "none",
        role=settings.role,
        rdzv_endpoint=f"{host}:{port}",
        rdzv_backend=backend,
        rdzv_configs=options,
        max_restarts=settings.max_restarts,
        monitor_interval=settings.monitor_interval,
        start_method=start_method,
        local_addr=host if is_alone else None,
    )


def _threads(settings: LaunchSettings) -> dict[str, str]:
    """The threads of each process, where nobody has said how many: all cores of this machine, shared evenly."""
    if "OMP_NUM_THREADS" in {*os.environ, *settings.environment}:
        return {}
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // settings.processes_here))}
