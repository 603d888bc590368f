"""Processes for a function, one for each XLA device, started by torch_xla."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..distributed import xla
from ..distributed.environment import patch_environment
from ..distributed.errors import ConfigError
from ..distributed.ports import LOOPBACK, free_port


def launch(function: Callable[..., Any], args: Sequence[Any] = (), start_method: str = "spawn") -> None:
    """Call a function in one process for each XLA device of this machine, by `torch_xla.launch`.

    A `Trainer` or an `Accelerator` with strategy="xla" that is made in it finds the other processes. Several machines
    need `MASTER_ADDR` and `MASTER_PORT`. The device must not have been used before.

    Args:
        function: called with `args`; at the top level of a module with the start method "spawn".
        args: what can be pickled.
        start_method: of Python's multiprocessing: `"spawn"`, or `"fork"` in a notebook.
    Raises:
        ConfigError: this process uses its device already, or by SPMD, or each process would have several devices.
        MissingDependencyError: there is no torch_xla.
    """
    torch_xla, runtime = xla.load(), xla.load("runtime")
    if runtime.is_spmd():
        raise ConfigError("XLAStrategy.launch starts a process for each device, and this one uses all of them (spmd).")
    if xla.is_started():
        raise ConfigError(
            "XLAStrategy.launch: this process has used its XLA device already, which others could not use any more. "
            "Call it before a Trainer or Accelerator with strategy='xla' is made, or anything is computed there."
        )
    address = os.environ.get("MASTER_ADDR", LOOPBACK), os.environ.get("MASTER_PORT") or str(free_port())
    torch_xla.launch(_run, (function, tuple(args), address), start_method)


def place_variables(address: tuple[str, str]) -> dict[str, str]:
    """The variables by which a process that torch_xla has started finds the others; none where it is the only one.
    Local; it starts the runtime.

    Args:
        address: host and port where they meet.
    Raises:
        ConfigError: it has a thread for each of several devices.
    """
    runtime = xla.load("runtime")
    if runtime.addressable_device_count() > 1:
        raise ConfigError(
            f"torch_xla runs {runtime.addressable_device_count()} threads in each process here, one for each device, "
            "which share what belongs to one process. Use all devices in one process without launch: "
            "strategy={'name': 'xla', 'spmd': True}."
        )
    if runtime.world_size() == 1:
        return {}
    return {
        "RANK": str(runtime.global_ordinal()),
        "WORLD_SIZE": str(runtime.world_size()),
        "LOCAL_RANK": str(runtime.local_ordinal()),
        "LOCAL_WORLD_SIZE": str(runtime.local_device_count()),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }


def _run(index: int, function: Callable[..., Any], args: tuple[Any, ...], address: tuple[str, str]) -> None:
    with patch_environment(**place_variables(address)):
        function(*args)
