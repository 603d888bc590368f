"""What every test gets: a folder of its own to work in, a fixed seed, and guards that fail it when it leaks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.distributed.random import preserved_random_state, set_seed

ROOT = Path(__file__).resolve().parent.parent

# What tools write at the root on their own while tests run.
TOOL_FOLDERS = {"build", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__", ".dev", ".venv"}
# Variables that belong to the whole process: pytest's own, and what libraries set for themselves at their first use.
PROCESS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "TORCHINDUCTOR_CACHE_DIR",  # torch, with deterministic algorithms or torch.compile
    "_MLFLOW_TELEMETRY_SESSION_ID",  # mlflow
    "KMP_DUPLICATE_LIB_OK",  # threadpoolctl, through scikit-learn
    "KMP_INIT_AT_FORK",
}
# How long the threads that were asked to end may take, in seconds.
THREAD_GRACE_SECONDS = 2.0


def pytest_configure() -> None:
    """One thread: bit-equal results on every machine, and faster on tensors of this size."""
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and say how many."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.kwargs.get("count", 1)
    found = torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA device(s), this machine has {found}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository, for tests that read its files."""
    return ROOT


# pytest sets these up in the order of their names, before a test's own fixtures, and takes them down in reverse: what
# the test's fixtures changed (monkeypatch, ...) is back in place when the guards look.


@pytest.fixture(autouse=True)
def guard_environment() -> Iterator[None]:
    """Fail a test after which an environment variable is another; put it back."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = (before.keys() | after.keys()) - PROCESS_VARIABLES
    changed = sorted(name for name in names if before.get(name) != after.get(name))
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in changed if name in before})
    assert not changed, f"the test leaked environment variables: {', '.join(changed)}. Use monkeypatch.setenv."


@pytest.fixture(autouse=True)
def guard_files() -> Iterator[None]:
    """Fail a test that writes into the repository's top folder or its `runs`."""
    before = _files_at_root()
    yield
    new = sorted(_files_at_root() - before)
    assert not new, f"the test leaked files into the repository: {', '.join(new)}. Write below tmp_path."


def _files_at_root() -> set[str]:
    runs = ROOT / "runs"
    names = {entry.name for entry in ROOT.iterdir() if not entry.name.endswith(".egg-info")} - TOOL_FOLDERS
    return names | {f"runs/{entry.name}" for entry in (runs.iterdir() if runs.is_dir() else ())}


@pytest.fixture(autouse=True)
def guard_signals() -> Iterator[None]:
    """Fail a test after which a signal has another handler; put it back."""
    # The first is pytest-timeout's own; by the other torch watches its workers, from the first loader that has some on.
    watched = signal.valid_signals() - {signal.SIGALRM, signal.SIGCHLD}
    before = {number: signal.getsignal(number) for number in watched}
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    for number in changed:
        signal.signal(number, before[number])
    names = ", ".join(signal.Signals(number).name for number in changed)
    assert not changed, f"the test leaked signal handlers: {names}. Put them back in a finally."


@pytest.fixture(autouse=True)
def guard_threads() -> Iterator[None]:
    """Fail a test that leaves a child process, or a thread which would hold this process."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE_SECONDS
    for thread in _blocking_threads(before):
        thread.join(max(0.0, deadline - time.monotonic()))
    threads = sorted(thread.name for thread in _blocking_threads(before))
    assert not threads, f"the test leaked threads: {', '.join(threads)}. Join them, or close what owns them."
    children = [child.name for child in multiprocessing.active_children()]
    assert not children, f"the test leaked processes: {', '.join(children)}. Join them."


def _blocking_threads(known: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in known and not thread.daemon]


# Each setting of the process that a test must leave as it was: how to read it and how to put it back.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "grad enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "autocast on CPU": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "autocast on CUDA": (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    ),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda on: setattr(torch.backends.cudnn, "deterministic", on),
    ),
}


@pytest.fixture(autouse=True)
def guard_settings() -> Iterator[None]:
    """Fail a test after which a setting of torch or of the garbage collector is another; put it back."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    yield
    changed = {name: now for name, (read, _) in SETTINGS.items() if (now := read()) != before[name]}
    for name in changed:
        SETTINGS[name][1](before[name])
    report = ", ".join(f"{name} ({before[name]} -> {now})" for name, now in changed.items())
    assert not changed, f"the test leaked settings: {report}. Put them back in a finally."
    assert not torch.distributed.is_initialized(), "the test leaked a process group. Destroy it."


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Every test begins with the random states of this seed, and leaves those that it found."""
    with preserved_random_state(torch.device("cpu")):
        yield set_seed(0)


class Processes:
    """Runs a function of a test module in several warm processes of one gloo group; see tests/processes.py."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool = pool
        self._folder = folder

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 110.0) -> list[Any]:
        """Call it with the same arguments in each. Returns what they gave, process 0 first."""
        results: list[Any] = self._pool.run(function, *args, folder=self._folder, timeout=timeout)
        return results


Pools = Callable[[int], Any]
"""Gives the pool of so many workers, see tests/processes.py."""


@pytest.fixture
def worker_pools(request: pytest.FixtureRequest) -> Pools:
    """Pools of workers that are started at their first use.

    Each module has its own: what libraries change in a process for good is not there for the tests of another one.
    """
    name = "deepspeed_pools" if "deepspeed" in request.module.__name__ else "module_pools"
    pools: Pools = request.getfixturevalue(name)
    return pools


@pytest.fixture(scope="module")
def module_pools() -> Iterator[Pools]:
    """Those of one module."""
    yield from _pools()


@pytest.fixture(scope="session")
def deepspeed_pools() -> Iterator[Pools]:
    """Those of all modules about DeepSpeed, which takes seconds to load in each worker."""
    yield from _pools()


def _pools() -> Iterator[Pools]:
    from .processes import WorkerPool  # only here: the tests of the guards have this file alone

    pools: dict[int, WorkerPool] = {}

    def pool_of(size: int) -> Any:
        if size not in pools:
            pools[size] = WorkerPool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two_processes(worker_pools: Pools, working_folder: Path) -> Processes:
    """Two processes of one gloo group."""
    return Processes(worker_pools(2), working_folder)


@pytest.fixture
def three_processes(worker_pools: Pools, working_folder: Path) -> Processes:
    """Three processes of one gloo group."""
    return Processes(worker_pools(3), working_folder)


@pytest.fixture
def four_processes(worker_pools: Pools, working_folder: Path) -> Processes:
    """Four processes of one gloo group."""
    return Processes(worker_pools(4), working_folder)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path) -> Iterator[Path]:
    """Every test runs in its own empty folder, so that relative paths (`runs/`) end there."""
    with contextlib.chdir(tmp_path):
        yield tmp_path
