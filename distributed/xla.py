"""XLA devices by torch_xla, which is imported when they are asked for.

torch_xla records what is computed on such a device, and runs it as one program when `sync` is called or a value is
read. Nothing of it is imported here before a strategy wants the device.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError, MissingDependencyError
from .imports import is_installed
from .launched import Place

DEVICE_TYPE = "xla"
"""torch's word for these devices."""
VERSIONS = "torch==2.9.0 torch_xla==2.9.0"
"""A pair that belongs together: torch_xla is built for one version of torch, and 2.9.0 is its newest."""


def load(module: str = "") -> Any:
    """torch_xla, or a module of it by its name inside. Local.

    Raises:
        MissingDependencyError: it is not installed, or can't be imported beside this torch; names a pair that can.
    """
    try:
        return importlib.import_module(f"torch_xla.{module}" if module else "torch_xla")
    except ImportError as error:
        reason = "is not installed"
        if is_installed("torch_xla"):
            reason = f"can't be imported beside torch {torch.__version__} ({error})"
        raise MissingDependencyError(
            f"strategy='xla' needs torch_xla, which {reason}. It is built for one version of torch: install the two "
            f"together, in an environment of their own: pip install 'loopwright[xla]', which is pip install {VERSIONS}"
        ) from error


def choose_device(place: Place, *, spmd: bool = False) -> torch.device:
    """The XLA device of this process. Local; it starts torch_xla's runtime, once in a process.

    Args:
        place: among several processes of a machine each takes the device of its index there.
        spmd: the device stands for all devices of the machine, over which tensors can be cut.
    Raises:
        ConfigError: several processes with several devices each, as on TPU v2 and v3, or with SPMD; or the runtime runs
            without SPMD already.
        MissingDependencyError: there is no torch_xla.
    """
    torch_xla = load()
    is_fresh = not is_started()
    if spmd:
        _use_spmd(place)
    elif is_fresh and place.local_num_processes > 1 and "PJRT_LOCAL_PROCESS_COUNT" not in os.environ:
        load("_internal.pjrt").initialize_multiprocess(place.local_process_index, place.local_num_processes)
    found = torch_xla.real_devices()
    if place.num_processes > 1 and len(found) > 1:
        raise ConfigError(
            f"strategy='xla' in {place.num_processes} processes, and this one has {len(found)} XLA devices. Start one "
            "process for each device, or a single one that uses all of them: strategy={'name': 'xla', 'spmd': True}."
        )
    device = torch.device(torch_xla.device())
    if is_fresh:
        seed(torch.initial_seed())  # what was seeded before the device was there
    _check_autograd(device)
    return device


def _use_spmd(place: Place) -> None:
    runtime = load("runtime")
    if place.num_processes > 1:
        raise ConfigError(
            f"strategy='xla' with spmd=True uses all devices in one process, and {place.num_processes} were started. "
            "Start one, or leave spmd and fsdp out."
        )
    if runtime.is_spmd():
        return
    if is_started():
        raise ConfigError(
            "strategy='xla' with spmd=True: this process has used its XLA device without SPMD already. Make the "
            "Trainer or Accelerator before anything else computes there."
        )
    runtime.use_spmd()


def sync(wait: bool = False) -> None:
    """Run what was recorded; the device's random state stays as it is, so that it does not matter how often. Local.

    Args:
        wait: return when it is done.
    """
    torch_xla, model = load(), load("core.xla_model")
    state = model.get_rng_state()
    torch_xla.sync(wait=wait)
    model.set_rng_state(state)


def seed(value: int) -> None:
    """Seed the device, where torch_xla's runtime runs; does nothing elsewhere. Local."""
    if is_started():
        load("core.xla_model").set_rng_state(value % 2**63)


def get_rng_state() -> Tensor:
    """The device's random state: one number, on the host. Local."""
    return torch.tensor([load("core.xla_model").get_rng_state()], dtype=torch.uint64).view(torch.int64)


def set_rng_state(state: Tensor) -> None:
    """Put back what `get_rng_state` gave. Local."""
    load("core.xla_model").set_rng_state(int(state.view(torch.uint64).item()))


def _check_autograd(device: torch.device) -> None:
    """Torch makes a thread for each device that it knows at the first backward pass of the process, and never again."""
    try:
        (torch.zeros((), device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues" not in str(error):
            raise
        raise ConfigError(
            "strategy='xla': a backward pass has run in this process before its XLA device was there, so that torch "
            "can't run one on it any more. Make the Trainer or Accelerator before that, or call "
            "torch_xla.real_devices() at the top of the script."
        ) from error


def is_started() -> bool:
    """Whether torch_xla's runtime runs in this process. Local."""
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())


def is_connected(num_processes: int) -> bool:
    """Whether the devices of all processes are known to this one's runtime, so that programs can exchange. Local."""
    count: int = load("runtime").world_size()
    if count in (1, num_processes):
        return count > 1
    raise ConfigError(
        f"torch_xla's runtime has {count} devices in its world, and {num_processes} processes were started. Start one "
        "process for each device."
    )
