"""A process's place, from the variables of each launcher."""

from __future__ import annotations

import os

import pytest

from loopwright import ConfigError
from loopwright.distributed.environment import LAUNCHER_VARIABLES
from loopwright.distributed.launched import Place, find_place, rendezvous_address

BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""What the script of an sbatch job has of its own, without being one of the tasks."""


def slurm(index: int, count: int, local_index: int, node: int, tasks: str) -> dict[str, str]:
    return BATCH_SCRIPT | {
        "SLURM_PROCID": str(index),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_LOCALID": str(local_index),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def openmpi(index: int, count: int, local_index: int, local_count: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (index, count, local_index, local_count)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}


def mpich(index: int, count: int, local_index: int, local_count: int) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (index, count, local_index, local_count)), strict=True))


def torchrun(index: int, count: int, local_index: int, local_count: int, node: int) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return dict(zip(names, map(str, (index, count, local_index, local_count, node)), strict=True))


def placed(launcher: str, index: int, count: int, local: tuple[int, int], node: tuple[int, int]) -> Place:
    return Place(
        launcher=launcher,
        process_index=index,
        num_processes=count,
        local_process_index=local[0],
        local_num_processes=local[1],
        node_index=node[0],
        num_nodes=node[1],
    )


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER_VARIABLES, "SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place()),
        ({"WORLD_SIZE": "1"}, Place()),
        (torchrun(5, 8, 1, 4, 1), placed("torchrun", 5, 8, (1, 4), (1, 2))),
        (torchrun(0, 1, 0, 1, 0), placed("torchrun", 0, 1, (0, 1), (0, 1))),
        ({"RANK": "1", "WORLD_SIZE": "2"}, placed("torchrun", 1, 2, (1, 2), (0, 1))),  # one machine, by hand
        (slurm(5, 8, 1, 1, "4(x2)"), placed("slurm", 5, 8, (1, 4), (1, 2))),
        (slurm(0, 7, 0, 0, "2(x3),1"), placed("slurm", 0, 7, (0, 2), (0, 4))),
        (slurm(5, 7, 1, 2, "2(x3),1"), placed("slurm", 5, 7, (1, 2), (2, 3 + 1))),
        (slurm(2, 3, 0, 1, "2,1"), placed("slurm", 2, 3, (0, 1), (1, 3))),
        (BATCH_SCRIPT, Place()),
        (openmpi(3, 4, 1, 2), placed("openmpi", 3, 4, (1, 2), (1, 2))),
        (mpich(3, 4, 3, 4), placed("mpich", 3, 4, (3, 4), (0, 1))),
        (mpich(2, 4, 0, 2), placed("mpich", 2, 4, (0, 2), (1, 2))),  # Intel MPI sets the same
        # One launcher inside another: the inner one counts.
        (BATCH_SCRIPT | openmpi(1, 2, 1, 2), placed("openmpi", 1, 2, (1, 2), (0, 1))),
        (slurm(1, 2, 0, 1, "1(x2)") | torchrun(5, 8, 1, 4, 1), placed("torchrun", 5, 8, (1, 4), (1, 2))),
        (slurm(1, 2, 0, 1, "1(x2)") | mpich(5, 8, 1, 4), placed("mpich", 5, 8, (1, 4), (1, 2))),
        # One that speaks for another: srun's PMI, and a batch script that sets RANK from SLURM_PROCID.
        (slurm(5, 8, 1, 1, "4(x2)") | {"PMI_RANK": "5", "PMI_SIZE": "8"}, placed("slurm", 5, 8, (1, 4), (1, 2))),
        (slurm(5, 8, 1, 1, "4(x2)") | {"RANK": "5", "WORLD_SIZE": "8"}, placed("slurm", 5, 8, (1, 4), (1, 2))),
    ],
)
def test_a_place_is_read(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Place) -> None:
    set_all(monkeypatch, variables)
    assert find_place() == expected


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is above 1, but RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "torchrun says that this is process 2 of 2.*check RANK and WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "process -1 of 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        (torchrun(0, 2, 3, 2, 0), "process 3 of 2 on this machine, of 2 in all. Check LOCAL_RANK and LOCAL_WORLD_SIZE"),
        (torchrun(0, 2, 0, 4, 0), "process 0 of 4 on this machine, of 2 in all"),
        (openmpi(4, 4, 0, 2), "openmpi .* check OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"),
        (slurm(0, 2, 0, 0, "two"), "SLURM_STEP_TASKS_PER_NODE='two'. Expected numbers such as"),
        (slurm(1, 2, 1, 0, "1(x2)"), "slurm .* Check SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_contradictions_are_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(ConfigError, match=says):
        find_place()


def test_processes_of_a_job_meet_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(num_processes=2, local_num_processes=2)
    assert rendezvous_address(place) == ("127.0.0.1", 29500)
    ports = []
    for job in ("77", "78", "prterun-host-1234@1"):
        monkeypatch.setenv("PMIX_NAMESPACE", job)
        monkeypatch.setenv("PMI_RANK", job[-1])  # differs among the processes of a job
        host, port = rendezvous_address(place)
        ports.append(port)
        assert host == "127.0.0.1" and 20000 <= port < 32000
    assert len(set(ports)) == 3
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("MASTER_ADDR", "first-host")
    assert rendezvous_address(place) == ("first-host", 1234)


def test_machines_need_to_be_told_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(num_processes=2, num_nodes=2, launcher="slurm")
    with pytest.raises(ConfigError, match="slurm started processes on 2 machines, but MASTER_ADDR is not set"):
        rendezvous_address(place)
    monkeypatch.setenv("MASTER_ADDR", "first-host")
    assert rendezvous_address(place) == ("first-host", 29500)
    assert "MASTER_PORT" not in os.environ
