"""This process's place in the world, as the launcher that started it says in environment variables."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .environment import launched_as
from .errors import ConfigError
from .ports import DEFAULT_PORT, LOOPBACK

_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below those that systems hand out by themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one process stands among all."""

    process_index: int = 0
    """Its index among all, the rank."""
    num_processes: int = 1
    """How many there are, the world size."""
    local_process_index: int = 0
    """Its index on its machine."""
    local_num_processes: int = 1
    """How many there are on its machine."""
    node_index: int = 0
    """The index of its machine."""
    num_nodes: int = 1
    """How many machines there are."""
    launcher: str = "none"
    """What started it: `"torchrun"`, `"slurm"`, `"openmpi"`, `"mpich"`, or `"none"`."""

    def __post_init__(self) -> None:
        if not 0 <= self.process_index < self.num_processes:
            raise ConfigError(
                f"{self.launcher} says that this is process {self.process_index} of {self.num_processes}. Expected an "
                f"index from 0 below the number: check {_variables_of(self.launcher)}, or unset them."
            )
        if not 0 <= self.local_process_index < self.local_num_processes <= self.num_processes:
            raise ConfigError(
                f"{self.launcher} says that this is process {self.local_process_index} of {self.local_num_processes} on"
                f" this machine, of {self.num_processes} in all. Check {_variables_of(self.launcher, local=True)}, or "
                "unset them."
            )


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables in which one launcher says the place."""

    launcher: str
    index: str
    count: str
    local_index: str
    local_count: str
    node: str = ""


# The first whose variables for index and count are set is taken: a launcher inside another is the one that counts.
# Where it does not say which process of its machine this is, another that agrees with it may: srun sets MPICH's index
# and count beside its own.
_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Names(
        "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    # Not SLURM_NTASKS: a batch script and an interactive shell have it as well, and are no task of it.
    _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
)  # fmt: skip


def find_place() -> Place:
    """This process's place by the launcher's variables; a world of one where there are none. Local.

    Raises:
        ConfigError: they are no numbers, or contradict each other.
    """
    found = [names for names in _LAUNCHERS if _is_set(names.index) and _is_set(names.count)]
    if found:
        alike = [names for names in found if _index_and_count(names) == _index_and_count(found[0])]
        return _read(next((names for names in alike if _is_set(names.local_index)), found[0]))
    if launched_as("WORLD_SIZE", 1) > 1:
        raise ConfigError("WORLD_SIZE is above 1, but RANK is not set. Set both, or start by `loopwright launch`.")
    return Place()


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch by torch's elastic agent that this process belongs to."""

    id: str
    """What tells it from others."""
    num_restarts: int
    """How often its processes were started again after one failed."""


def find_launch() -> Launch | None:
    """The launch that this process belongs to, None where none started it or it has no name of its own. Local.

    Raises:
        ConfigError: the number of restarts is no number.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "").strip()
    # "none" is what torchrun calls every launch that nobody named.
    return Launch(name, launched_as("TORCHELASTIC_RESTART_COUNT", 0)) if name not in ("", "none") else None


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name, "").strip())


def _index_and_count(names: _Names) -> tuple[int, int]:
    return launched_as(names.index, 0), launched_as(names.count, 1)


def _variables_of(launcher: str, local: bool = False) -> str:
    """The variables in which a launcher says the place, for errors."""
    names = next((names for names in _LAUNCHERS if names.launcher == launcher), _LAUNCHERS[0])
    pair = (names.local_index, names.local_count or _SLURM_TASKS) if local else (names.index, names.count)
    return " and ".join(pair)


def _read(names: _Names) -> Place:
    index, count = _index_and_count(names)
    local_index = launched_as(names.local_index, index)  # one machine where nothing is said of it
    local_count = launched_as(names.local_count, 0) if names.local_count else _slurm_tasks_here(os.environ)
    if not local_count:
        local_count = count if local_index == index else local_index + 1
    node = launched_as(names.node, index // local_count) if names.node else index // local_count
    return Place(
        process_index=index,
        num_processes=count,
        local_process_index=local_index,
        local_num_processes=local_count,
        node_index=node,
        num_nodes=max(-(-count // local_count), node + 1),
        launcher=names.launcher,
    )


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """This machine's tasks of a step, 0 if unknown. SLURM lists them for all machines: `"2(x3),1"` is 2, 2, 2 and 1.

    Raises:
        ConfigError: the list is none.
    """
    text = environment.get(_SLURM_TASKS, "").strip()
    tasks: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"{_SLURM_TASKS}={text!r}. Expected numbers such as '2(x3),1', as srun sets them.")
        tasks += [int(found[1])] * int(found[2] or 1)
    node = launched_as("SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else 0


def rendezvous_address(place: Place) -> tuple[str, int]:
    """Host and port where the processes of a world meet, for launchers that don't set them. Local.

    Raises:
        ConfigError: there are several machines and `MASTER_ADDR` is not set.
    """
    host = os.environ.get("MASTER_ADDR", "").strip()
    if not host and place.num_nodes > 1:
        raise ConfigError(
            f"{place.launcher} started processes on {place.num_nodes} machines, but MASTER_ADDR is not set. Set it to "
            "the host of process 0, on all of them."
        )
    port = launched_as("MASTER_PORT", 0) or _job_port()
    return host or LOOPBACK, port


def _job_port() -> int:
    """A port that all processes of a job choose alike, and other jobs hardly do."""
    for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if text := os.environ.get(name, "").strip():
            return _FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS
    return DEFAULT_PORT
