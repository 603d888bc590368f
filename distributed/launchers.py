"""Running a function in several processes from within a program: a notebook, a console, a test."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .environment import PREFIXES, patch_environment
from .errors import ConfigError
from .group import is_connected
from .launching import LaunchSettings, run_function
from .process import ProcessMethods

_DEVICE_MODULES = ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa")
_EMPTY_CELL = CellType()  # of a variable that has no value yet
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
        ConfigError: this process is one of several, or the function uses an `Accelerator` or `Trainer` of it.
        LaunchError: a process failed; the text has its index and its traceback.
    """
    _check_fork(starts_devices=False)
    _check_used(function, args)
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
        ConfigError: a number is missing or wrong, this process has started what forks can't go on with, or the function
            uses an `Accelerator` or `Trainer` of it.
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
        with patch_environment(**settings.environment):
            function(*args)
        return
    _check_fork(starts_devices=True)
    _check_used(function, args)
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


def _check_used(function: Callable[..., object], args: Sequence[Any]) -> None:
    """Refuse a function that uses what knows nothing of the processes to come: it would train alone in each of them.

    What else there is in this process does no harm, since each process makes its own.
    """
    for name, value in (*_values_used_by(function), *((f"args[{i}]", value) for i, value in enumerate(args))):
        is_object = hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType))
        held = vars(value).values() if is_object else ()
        if any(isinstance(each, ProcessMethods) for each in (value, *held)):
            raise ConfigError(
                f"the function to launch uses {name}, {_with_article(type(value).__name__)} of this process, which "
                "believes to be alone. Create it inside the function."
            )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _values_used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The names and values that a function takes from around it, and that functions of its module take which it uses.

    Not those that are only known when it runs, such as the attributes of an object.
    """
    waiting, seen = [function], set()
    while waiting:
        found: Any = waiting.pop()
        if isinstance(found, functools.partial):
            yield from ((f"argument {name}", value) for name, value in _arguments_of(found))
            found = found.func
        if isinstance(found, MethodType):
            yield f"the object of {found.__qualname__}", found.__self__
            found = found.__func__
        if not isinstance(found, FunctionType) or found in seen:
            continue
        seen.add(found)
        for name, value in _surroundings_of(found):
            yield name, value
            if isinstance(value, (FunctionType, functools.partial)) and value.__module__ == function.__module__:
                waiting.append(value)


def _arguments_of(partial: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((str(index), value) for index, value in enumerate(partial.args))
    yield from partial.keywords.items()


def _surroundings_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    codes = [function.__code__]
    for code in codes:  # it grows by the functions inside
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    loaded = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    yield from ((name, function.__globals__[name]) for name in sorted(loaded & function.__globals__.keys()))
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in variables if cell != _EMPTY_CELL)
    yield from (("a default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


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
