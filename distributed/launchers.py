"""Running a function in several processes from within a program: a notebook, a console, a test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .environment import PREFIXES
from .errors import ConfigError
from .group import is_connected
from .launching import LaunchSettings, run_function
from .process import ProcessMethods, ProcessState

_DEVICE_MODULES = ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa")
# Libraries that are known to start a device when they are imported.
_STARTERS = ("bitsandbytes", "deepspeed", "apex", "transformer_engine", "jax")


def debug_launcher(function: Callable[..., object], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several processes on the CPU, which find each other over gloo. Local.

    The processes are forks of this one, so the function need not be picklable; what it returns is dropped, and this
    process and its environment stay as they are.

    Args:
        function: creates its own `Accelerator` or `Trainer`.
        args: its arguments.
        num_processes: how many.
    Raises:
        LaunchError: a process failed; the text has its index and its traceback.
    """
    _check_fork(starts_devices=False)
    run_function(
        LaunchSettings(num_processes=num_processes, environment={f"{PREFIXES[0]}USE_CPU": "true"}), function, args
    )


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = 0,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
) -> None:
    """Run a function in several processes, one per accelerator device or on the CPU, from a notebook. Local.

    The processes are forks of this one, so the function need not be picklable; what it returns is dropped, and this
    process and its environment stay as they are. With one process the function is called here.

    Args:
        function: creates its own `Accelerator` or `Trainer`, and touches no device before.
        args: its arguments.
        num_processes: how many on this machine.
        mixed_precision: the number format of its `Accelerator`: no, bf16 or fp16.
        use_port: where the processes meet; 0: a free port, or 29500 with several machines.
        master_addr: the address of machine 0.
        node_rank: this machine's index.
        num_nodes: machines that take part, each with its own notebook.
        rdzv_backend: how the launchers of the machines meet, by torch's word.
        rdzv_endpoint: where, as host:port, in place of `master_addr` and `use_port`.
        rdzv_conf: options of that.
        max_restarts: how often all are started again after one failed.
        monitor_interval: seconds between two looks at the processes.
    Raises:
        ConfigError: a number is missing or wrong, or this process has started what forks can't go on with.
        LaunchError: a process failed; the text has its index and its traceback.
    """
    if num_processes is None:
        raise ConfigError("num_processes is missing. Say how many are to run: notebook_launcher(f, num_processes=2).")
    host, port = _endpoint(rdzv_endpoint, master_addr, use_port)
    settings = LaunchSettings(
        num_processes=num_processes * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=host,
        main_process_port=port,
        rdzv_backend=rdzv_backend,
        rdzv_conf={name: str(value) for name, value in (rdzv_conf or {}).items()},
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        environment={f"{PREFIXES[0]}MIXED_PRECISION": _precision(mixed_precision)},
    )
    if settings.num_processes == 1:
        _call_here(settings, function, args)
        return
    _check_accelerators()
    _check_fork(starts_devices=True)
    run_function(settings, function, args)


def started_devices() -> list[str]:
    """The kinds of device that this process has started, such as "cuda": forks of it can't use them. Local."""
    found = []
    for name in _DEVICE_MODULES:
        is_initialized = getattr(getattr(torch, name, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            found.append(name)
    return found


def _check_fork(*, starts_devices: bool) -> None:
    """Refuse to fork this process where the forks could not go on."""
    if is_connected():
        raise ConfigError(
            "this process is already one of several, so it can't start processes. Call the function itself, or leave "
            "the group first by torch.distributed.destroy_process_group()."
        )
    if starts_devices and (kinds := started_devices()):
        imported = [name for name in _STARTERS if name in sys.modules]
        suspects = f" {' and '.join(imported)} may do so when imported." if imported else ""
        raise ConfigError(
            f"{kinds[0]} is already in use in this process, and processes forked from it can't use it: something moved "
            f"a tensor or a model to it, or asked for its properties, before the launch.{suspects} Restart the "
            "notebook, and touch the device inside the function alone."
        )


def _check_accelerators() -> None:
    """Refuse where an `Accelerator` exists: the function would use it in place of one that knows the processes."""
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), ProcessMethods) and not issubclass(type(thing), ProcessState):
            raise ConfigError(
                f"this process has an {type(thing).__name__} already, which believes to be alone. Create it inside the "
                "function, and restart the notebook, or delete the one that there is, before the launch."
            )


def _endpoint(rdzv_endpoint: str, host: str, port: int | str) -> tuple[str, int]:
    if rdzv_endpoint:
        host, _, port = rdzv_endpoint.rpartition(":")
    text = str(port).strip()
    if not text.isdigit() or not host:
        raise ConfigError(f"got {host!r} and {port!r}. Expected a host and the number of a port, 0 for a free one.")
    return host, int(text)


def _precision(word: str) -> str:
    if word not in ("no", "bf16", "fp16"):
        raise ConfigError(f"mixed_precision={word!r}. Accepted: no, bf16, fp16.")
    return word


def _call_here(settings: LaunchSettings, function: Callable[..., object], args: Sequence[Any]) -> None:
    """Call the function in this process, with the variables that a launch would give it."""
    before = {name: os.environ.get(name) for name in settings.environment}
    os.environ.update(settings.environment)
    try:
        function(*args)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
