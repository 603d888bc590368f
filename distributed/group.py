"""Joining and leaving the default process group of torch.

torch has one default group per process; this module creates it, or adopts the one that is there, and starts the watch
over it. CPU tensors always travel over gloo, also where the device has a backend of its own, so that what is exchanged
between hosts never waits for a device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from . import watch
from .environment import launched_as, patch_environment
from .errors import ConfigError, LaunchError, suggest
from .launched import Place, find_place, rendezvous_address

_HAS_GROUPS = dist.is_available()


class _Joined:
    """The place that this process has in torch's default group, of which there is one per process."""

    place: Place | None = None
    spares_forks = False


def joined_place() -> Place | None:
    """The place with which this process has joined the group, None without one. Local."""
    return _Joined.place if is_connected() else None


def has_joined() -> bool:
    """Whether this process has ever joined a group, be it there still or not. Local."""
    return _Joined.place is not None


def own_place() -> Place:
    """The place with which this process has joined the group, before that what the launcher says. Local.

    Raises:
        ConfigError: the launcher's variables contradict each other.
    """
    return joined_place() or find_place()


def index_and_count() -> tuple[int, int]:
    """This process's index and the number of processes: of the group, before there is one of the launcher. Local.

    Raises:
        ConfigError: the launcher's variables contradict each other.
    """
    if is_connected():
        return rank(), world_size()
    place = find_place()
    return place.process_index, place.num_processes


def is_connected() -> bool:
    """Whether this process is in a group with others. Local."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's index in the group, 0 without one. Local."""
    return dist.get_rank() if is_connected() else 0


def world_size() -> int:
    """Processes in the group, 1 without one. Local."""
    group = dist.group.WORLD if _HAS_GROUPS else None  # asked for in each step: shorter than by way of `is_connected`
    return 1 if group is None else group.size()


def connect(
    place: Place,
    device: torch.device,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> None:
    """Join the others in the default group, or adopt the group that there is. Collective.

    Args:
        place: this process's place.
        device: where it computes; decides the backend.
        backend: torch's word for another one.
        timeout: how long a collective waits for other processes; None: torch's default for the backend.
        init_method: torch's URL of where the processes meet; None: `MASTER_ADDR` and `MASTER_PORT`.
    Raises:
        ConfigError: the group that there is has other members, or torch does not know the backend.
        LaunchError: the others could not be joined.
    """
    if place.num_processes == 1:
        return
    if not dist.is_available():
        raise ConfigError(f"{place.num_processes} processes were started, but this torch has no torch.distributed.")
    if dist.is_initialized():
        _check_members(place)
    else:
        _join(place, _known(backend) if backend else backend_of(device), timeout, init_method)
    _Joined.place = place
    _spare_forks()
    watch.start_watch(place.process_index, place.num_processes, timeout)


def disconnect() -> None:
    """Leave the default group. Collective where processes may still send; does nothing without a group."""
    watch.stop_watch()  # it may be there longer than the group, see `watch.leave_group_after`
    if is_connected():
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """The word of torch for the backend of a device, with gloo for CPU tensors beside it. Local."""
    if device.type in ("cpu", "xla"):  # XLA devices exchange gradients within their programs, all else over the host
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _spare_forks() -> None:
    """Keep forks of this process, such as workers of a DataLoader, from collecting what was garbage in it before.

    A group that nobody holds any more waits for its threads when it is collected, and a fork has no such threads: it
    would wait for ever.
    """
    if not _Joined.spares_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
        _Joined.spares_forks = True


def _check_members(place: Place) -> None:
    found = (dist.get_rank(), dist.get_world_size())
    if found != (place.process_index, place.num_processes):
        raise ConfigError(
            f"torch's process group has this process as {found[0]} of {found[1]}, but it was started as "
            f"{place.process_index} of {place.num_processes}. Let `Accelerator` or `Trainer` create the group, or pass "
            "the launcher's rank and world_size to init_process_group."
        )


def _known(backend: str) -> str:
    """The word for a backend, or for one per type of device, as in `"cpu:gloo,cuda:nccl"`, if torch has each.

    Before any process waits for the others: torch looks at it only when all of them are there.
    """
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if not dist.is_backend_available(name):
            known = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
            raise ConfigError(f"backend={backend!r}: this torch has no {name!r}. {suggest(name, known)}")
    return backend


def _join(place: Place, backend: str, timeout: timedelta | None, init_method: str | None) -> None:
    try:
        with _meeting_point(place, init_method), watch.noted_connections():
            store = _store_of_restart(place, timeout) if init_method is None else None
            dist.init_process_group(
                backend,
                init_method=init_method,
                timeout=timeout,
                rank=place.process_index,
                world_size=place.num_processes,
                store=store,
            )
    except ValueError as error:
        raise ConfigError(f"process group with backend={backend!r}, init_method={init_method!r}: {error}") from error
    except (RuntimeError, OSError) as error:
        where = "MASTER_ADDR and MASTER_PORT are" if init_method is None else f"init_method={init_method!r} is"
        raise LaunchError(
            f"process {place.process_index} of {place.num_processes} could not join the others: {error}. Check that all"
            f" of them were started, and that {where} the same for all, reachable, and not in use by another run."
        ) from error


def _store_of_restart(place: Place, timeout: timedelta | None) -> Store | None:
    """Where processes meet that a launcher has started again, None at the first start. Collective.

    The launcher's store may be that of the start before, with the addresses of processes that are gone.
    """
    restarts = launched_as("TORCHELASTIC_RESTART_COUNT", 0)
    if not restarts:
        return None
    options = {} if timeout is None else {"timeout": timeout}
    found: Any = next(rendezvous("env://", place.process_index, place.num_processes, **options))
    return PrefixStore(f"restart {restarts}", found[0])


@contextmanager
def _meeting_point(place: Place, init_method: str | None) -> Iterator[None]:
    """A context in which torch finds the address to meet at, also where the launcher did not set it."""
    if init_method is not None or all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        yield
        return
    host, port = rendezvous_address(place)
    with patch_environment(MASTER_ADDR=host, MASTER_PORT=port):
        yield
