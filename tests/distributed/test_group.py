"""Joining, adopting and leaving torch's default group."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright import ConfigError, LaunchError
from loopwright.distributed import group
from loopwright.distributed.launched import Place

from ..nursery import nursery

CPU = torch.device("cpu")
PAIR = Place(num_processes=2, local_num_processes=2)

SCRIPT = """
import atexit
import os
import torch
import torch.distributed as dist
from loopwright import ProcessState

atexit.register(lambda: print(dist.is_initialized()))  # after what was registered later
state = ProcessState(cpu=True)
total = state.reduce(torch.tensor([state.process_index + 1.0])).item()
names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
print(state.place.launcher, state.process_index, state.num_processes, total, names, flush=True)
if state.process_index == 0:
    state.destroy_process_group()
    assert not dist.is_initialized()
"""


def joined(index: int = 0, count: int = 2) -> Place:
    return Place(process_index=index, num_processes=count, local_num_processes=count, local_process_index=index)


def test_one_process_needs_no_group() -> None:
    group.connect(Place(), CPU)
    assert (group.is_connected(), group.rank(), group.world_size(), group.joined_place()) == (False, 0, 1, None)
    group.disconnect()


def test_backends_are_those_of_the_device() -> None:
    assert group.backend_of(CPU) == "gloo"
    assert group.backend_of(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert group.backend_of(torch.device("xpu")) == "cpu:gloo,xpu:xccl"


def adopts_and_leaves() -> dict[str, Any]:
    """The group of the workers is left, made by torch alone, adopted, and joined again."""
    place = group.joined_place()
    assert place is not None
    found: dict[str, Any] = {"before": (group.is_connected(), group.rank(), group.world_size())}
    group.disconnect()
    found["left"] = (group.is_connected(), group.rank(), group.world_size(), group.joined_place())

    dist.init_process_group(
        "gloo", init_method=f"file://{Path('meet').absolute()}", rank=place.process_index, world_size=2
    )
    for wrong in (joined(1 - place.process_index), joined(place.process_index, 3)):
        try:
            group.connect(wrong, CPU)
        except ConfigError as error:
            found.setdefault("wrong", []).append(str(error))
    made = dist.group.WORLD
    group.connect(place, CPU)
    assert dist.group.WORLD is made
    found["adopted"] = (group.is_connected(), group.rank(), group.joined_place() == place)
    group.disconnect()

    meeting = f"file://{Path('meet_again').absolute()}"
    group.connect(place, CPU, backend="gloo", timeout=timedelta(minutes=2), init_method=meeting)
    total = torch.tensor([group.rank() + 1.0])
    dist.all_reduce(total)
    found["again"] = (dist.get_backend(), total.item())
    return found


def test_a_group_is_left_adopted_and_joined_again(two_processes: Any) -> None:
    results = two_processes(adopts_and_leaves)
    for index, found in enumerate(results):
        assert found["before"] == (True, index, 2)
        assert found["left"] == (False, 0, 1, None)
        assert found["adopted"] == (True, index, True)
        assert found["again"] == ("gloo", 3.0)
        assert f"this process as {index} of 2, but it was started as {1 - index} of 2" in found["wrong"][0]
        assert f"this process as {index} of 2, but it was started as {index} of 3" in found["wrong"][1]
        assert "Let `Accelerator` or `Trainer` create the group" in found["wrong"][1]


def forks_with_a_group_in_its_garbage() -> str:
    """What becomes of a fork that collects garbage, when this process has a group in its own."""
    gc.disable()
    try:
        garbage: list[Any] = [dist.new_group()]
        dist.destroy_process_group(garbage[0])
        garbage.append(garbage)
        del garbage
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        end = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hangs"
            time.sleep(0.01)
        return "ended"
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_fork_does_not_wait_for_the_threads_of_a_dead_group(two_processes: Any) -> None:
    assert two_processes(forks_with_a_group_in_its_garbage) == ["ended", "ended"]


def test_processes_that_mpi_starts_find_each_other() -> None:
    Path("script.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    started = []
    for index in (0, 1):
        # The namespace changes the port with each run of this test.
        variables = {"RANK": index, "SIZE": 2, "LOCAL_RANK": index, "LOCAL_SIZE": 2}
        environment = inherited | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
        environment["PMIX_NAMESPACE"] = f"test-{os.getpid()}"
        started.append(nursery().start("script.py", env=environment))
    ended = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert [out for out, _ in ended] == [f"openmpi {index} 2 3.0 []\nFalse\n" for index in (0, 1)]


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen(1)
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=rf"process 0 of 2 could not join .*{port}.*MASTER_PORT are the same"):
            group.connect(PAIR, CPU)
    assert not group.is_connected()


def test_others_that_do_not_come_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"process 0 of 2 could not join the others.*Check that all of them were"):
        group.connect(PAIR, CPU, timeout=timedelta(seconds=1), init_method=f"file://{tmp_path / 'meet'}")
    assert not group.is_connected()


@pytest.mark.parametrize("backend", ["glue", "cpu:gloo,cuda:glue"])
def test_a_backend_that_torch_has_not_is_refused_before_anybody_waits(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend='{backend}': this torch has no 'glue'.*gloo"):
        group.connect(PAIR, CPU, backend=backend)
    assert not group.is_connected()


def test_a_meeting_place_that_torch_does_not_know() -> None:
    with pytest.raises(LaunchError, match=r"No rendezvous handler .*init_method='carrier-pigeon://here' is the same"):
        group.connect(PAIR, CPU, init_method="carrier-pigeon://here")
    assert not group.is_connected()
