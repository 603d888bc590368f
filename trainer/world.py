"""Which processes a Trainer runs on: those that a launcher started, or those that it starts itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch

from ..callbacks.intervals import Duration
from ..distributed import group
from ..distributed.environment import read_flag
from ..distributed.errors import ConfigError, check_integer
from ..distributed.launched import Place
from ..distributed.slots import group_timeout
from ..strategies.registry import AUTO, SINGLE, StrategyLike, split_fp8
from ..strategies.strategy import Strategy


def read_world(devices: int | str, num_nodes: int, strategy: StrategyLike) -> Place:
    """This process's place in the world that the arguments ask for. Local.

    Args:
        devices: how many of each machine; "auto" takes all that the launcher started processes for. Without a launcher
            it is one, or each accelerator of this machine where the strategy is one for several processes.
        num_nodes: how many machines.
        strategy: as the Trainer was given it.
    Returns:
        The launcher's place; without one, that of process 0 of as many as there are devices.
    Raises:
        ConfigError: the arguments contradict the launcher, or several machines are wanted without one.
    """
    wanted = _read_devices(devices)
    check_integer("num_nodes", num_nodes, 1, "It counts machines.")
    place = group.own_place()
    if place.num_processes > 1 or place.launcher != "none":
        _check_launched(place, wanted, num_nodes)
        return place
    if num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes}, but no launcher has started this process. Start the script on each machine with "
            f"`loopwright launch --num_machines {num_nodes} --machine_rank ... --main_process_ip ...`, or by srun."
        )
    if wanted is None:
        wanted = _accelerators() if _takes_several(strategy) else 1
    return Place(num_processes=wanted, local_num_processes=wanted)


def read_timeout(value: float | str | timedelta | None) -> timedelta | None:
    """How long processes are to wait for each other, None: as long as torch has it. Local.

    Raises:
        ConfigError: it is no time.
    """
    if value is None:
        return None
    duration = Duration.parse(value, unit="seconds", option="process_timeout")
    if duration.unit != "seconds":
        raise ConfigError(f"process_timeout={value!r} counts {duration.unit}. Expected a time, such as '10 min'.")
    return timedelta(seconds=duration.amount)


def warn_of_timeout(wanted: timedelta | None) -> None:
    """Warn where the group of processes that is there already has another timeout than the one wanted. Local."""
    if wanted is None:
        return
    if group_timeout() != wanted:
        warnings.warn(
            f"process_timeout={wanted.total_seconds():g} s has no effect: the processes are in a group already, which "
            "was made before this Trainer ran. Set it where the group is made, or in the first Trainer.",
            stacklevel=2,
        )


def _read_devices(devices: int | str) -> int | None:
    if devices == "auto":
        return None
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    check_integer("devices", devices, 1, "It counts the devices of each machine; 'auto' takes what is there.")
    return int(devices)


def _check_launched(place: Place, wanted: int | None, num_nodes: int) -> None:
    if wanted is not None and wanted != place.local_num_processes:
        by = "the first Trainer" if place.launcher == "none" else place.launcher
        raise ConfigError(
            f"devices={wanted}, but {by} started {place.local_num_processes} processes on this machine. Leave devices "
            f"out, or start {wanted}."
        )
    if num_nodes not in (1, place.num_nodes):
        raise ConfigError(
            f"num_nodes={num_nodes}, but {place.launcher} started processes on {place.num_nodes} machines. Leave "
            "num_nodes out."
        )


def _takes_several(strategy: StrategyLike) -> bool:
    if isinstance(strategy, Strategy):
        return strategy.takes_several
    inner, _ = split_fp8(strategy)
    if isinstance(inner, Strategy):
        return inner.takes_several
    word = inner.get("name") if isinstance(inner, Mapping) else inner
    return word not in (AUTO, SINGLE)


def _accelerators() -> int:
    if read_flag("USE_CPU") or not torch.accelerator.is_available():
        return 1
    return max(torch.accelerator.device_count(), 1)
