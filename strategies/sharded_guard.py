"""Guarded passes of a sharded model: what meets in them, and how its units come back out of the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ..distributed.errors import ConfigError
from ..distributed.memory import should_reduce_batch_size
from ..distributed.meshes import MeshSizes
from .guard import Guard, GuardedCollective, LeftPass
from .recompute import RecomputedForward
from .sharded_model import Sharded
from .sharded_state import groups_of


def check_guardable(sizes: MeshSizes) -> None:
    """Refuse guarded passes where a pass has collectives of which nobody could tell before it. Local.

    Raises:
        ConfigError: layers or sequences are cut, weights are not spread, or torch can't take a pass back.
    """
    from torch.distributed.fsdp import FSDPModule

    given = {name: size for name, size in sizes.by_name().items() if size not in (None, 1)}
    others = [f"{name} {size}" for name, size in given.items() if name not in ("replicate", "shard")]
    if others:
        raise ConfigError(
            f"auto_accumulate=True can't be used with a mesh of {' and '.join(others)}: processes compute parts of the "
            "same batch there, and wait for each other inside of its layers. Leave that axis out, or use smaller "
            "batches with accumulate=, which find_executable_batch_size can look for."
        )
    if sizes.shard == 1:
        raise ConfigError(
            "auto_accumulate=True can't be used with a mesh of shard 1 under strategy='fsdp', where weights are not "
            "spread over processes. Use strategy='ddp', which does the same there."
        )
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(
            "auto_accumulate=True with strategy='fsdp' needs a torch whose FSDP can leave a pass in its middle "
            "(FSDPModule.reset_iter_state, from 2.13 on). Update torch, or use smaller batches with accumulate=."
        )


@contextmanager
def guarded(found: Sharded) -> Iterator[None]:
    """A context of passes that all processes leave together where memory runs out on one of them. Collective.

    Where they leave it, units are as before it, and so is what is known of their order; gradients are not.

    Raises:
        LeftPass: it ran out on another process.
    """
    passes = found.passes
    assert passes is not None
    guard = _guard_of(found)
    known = passes.learned()
    guard.begin()
    try:
        yield
        guard.meet()
    except BaseException as error:
        if not isinstance(error, LeftPass):
            if not should_reduce_batch_size(error):
                raise
            guard.leave()
        passes.leave(known)
        _come_back(found.entry)
        raise
    finally:
        guard.end()


def _guard_of(found: Sharded) -> Guard:
    """The model's guard, at which its collectives meet from now on. Local, on all processes alike."""
    if found.guard is None:
        assert found.passes is not None
        _check_recomputed(found.entry)
        found.guard = guard = Guard()
        found.passes.guard_rounds(guard)
        for number, group in enumerate(groups_of(found.entry), 1):
            group._all_gather_comm = GuardedCollective(group._all_gather_comm, guard, number)
            group._reduce_scatter_comm = GuardedCollective(group._reduce_scatter_comm, guard, -number)
            if any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in group.fsdp_params):
                group.unshard = partial(_meet_before, guard, group, group.unshard)
    return found.guard


def _check_recomputed(entry: nn.Module) -> None:
    """Refuse units inside of one that is computed a second time: their order is that of what it computes then, which a
    process without a part of a batch can't tell. Local, on all processes alike.

    Raises:
        ConfigError: names one.
    """
    from torch.distributed.fsdp import FSDPModule

    for name, unit in entry.named_modules():
        if isinstance(unit.__dict__.get("forward"), RecomputedForward):
            inner = next((path for path, each in unit.named_modules() if path and isinstance(each, FSDPModule)), None)
            if inner is not None:
                raise ConfigError(
                    f"auto_accumulate=True can't be used with activation_checkpointing of a unit ({name}) that has "
                    f"another one inside ({inner}). Wrap one of them alone, or leave one of the options out."
                )


def _meet_before(guard: Guard, group: Any, unshard: Callable[..., None], async_op: bool = False) -> None:
    """What torch calls to gather a unit's weights, where they agree on scales (of FP8) before they are gathered."""
    if group._all_gather_result is None and not group.is_unsharded:
        guard.meet()
    unshard(async_op)


def _come_back(entry: Any) -> None:
    """Bring units from the middle of a pass to where the next one begins, each process with its parts alone. Local."""
    if entry._get_fsdp_state()._is_root is None:
        return  # no pass has come to them yet
    entry.reset_iter_state()
    for group in groups_of(entry):
        for parameter in group.fsdp_params:
            parameter.free_unsharded_param()  # also of a unit for which memory ran out while it was made whole
