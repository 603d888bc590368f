"""Meshes: processes in a grid, along each axis of which they share another kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .errors import ConfigError, check_integer
from .shares import DataShare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD, CONTEXT, SEQUENCE, TENSOR = "dp_replicate", "dp_shard", "cp", "sp", "tp"
"""The names of the axes, in their order: of two processes one after another, the last axis is the one between them."""
JOINTS = {
    "dp": (REPLICATE, SHARD),
    "dp_shard_cp": (SHARD, CONTEXT, SEQUENCE),
    "dp_cp": (REPLICATE, SHARD, CONTEXT, SEQUENCE),
}
"""Axes that are taken together: those of different batches, of parts of weights, of different losses. The names are
Accelerate's; of the two axes of sequences a mesh has one at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """How many processes there are along each axis of a mesh.

    Raises:
        ConfigError: a size is no integer of at least 1, or sequences are cut in two ways.
    """

    replicate: int = 1
    """Copies of the model, over which gradients are averaged."""
    shard: int | None = None
    """Parts of the weights, each process with batches of its own; None: what the other sizes leave."""
    context: int = 1
    """Parts of each sequence; attention sends keys and values around."""
    sequence: int = 1
    """Parts of each sequence; attention exchanges heads."""
    tensor: int = 1
    """Parts of the layers, of which a plan says how they are cut."""

    def __post_init__(self) -> None:
        for name, size in self.by_name().items():
            if size is not None:
                check_integer(f"mesh.{name}", size, 1, "It counts processes.")
        if self.context > 1 and self.sequence > 1:
            raise ConfigError(
                f"mesh.context={self.context} and mesh.sequence={self.sequence} both cut sequences. Leave one of them "
                "out; sequence runs everywhere, context on accelerators."
            )

    @property
    def parts_of_sequences(self) -> int:
        """Into how many parts each sequence is cut, in either way."""
        return self.context * self.sequence

    def by_name(self) -> dict[str, int | None]:
        """The sizes by the names that options have for them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def filled(self, num_processes: int) -> MeshSizes:
        """The same sizes, of which none is open.

        Raises:
            ConfigError: they don't multiply to the number of processes.
        """
        others = self.replicate * self.parts_of_sequences * self.tensor
        sizes = replace(self, shard=num_processes // others or 1) if self.shard is None else self
        total = others * (sizes.shard or 1)
        if total == num_processes:
            return sizes
        given = {name: size for name, size in self.by_name().items() if size not in (None, 1)}
        shown = " x ".join(f"{name} {size}" for name, size in given.items()) or "1"
        wanted = f"a multiple of {others}" if self.shard is None else str(total)
        raise ConfigError(
            f"a mesh of {shown} needs {wanted} processes, and there are {num_processes}. Give sizes that multiply to "
            f"{num_processes}; shard, left out, takes what the others leave."
        )

    def share(self, process_index: int, num_processes: int) -> DataShare:
        """Which share of the data a process gets.

        Raises:
            ConfigError: the sizes don't multiply to the number of processes.
        """
        sizes = self.filled(num_processes)
        peers = sizes.parts_of_sequences * sizes.tensor
        return DataShare(
            num_processes=num_processes // peers,
            process_index=process_index // peers,
            num_peers=peers,
            peer=process_index % peers,
            num_twins=sizes.tensor,
        )


def build_mesh(
    sizes: MeshSizes, device_type: str, *, always: Sequence[str] = (), joins: bool = False
) -> DeviceMesh | None:
    """The mesh of all processes, with the axes along which there are several; None where there is no such axis.
    Collective.

    Args:
        sizes: none of them open.
        device_type: where the processes compute.
        always: axes that it has in any case.
        joins: make the axes of `JOINTS` as well, which `mesh[name]` gives then.
    """
    from torch.distributed.device_mesh import init_device_mesh

    named: Mapping[str, int] = {
        REPLICATE: sizes.replicate,
        SHARD: sizes.shard or 1,
        CONTEXT: sizes.context,
        SEQUENCE: sizes.sequence,
        TENSOR: sizes.tensor,
    }
    axes = {name: size for name, size in named.items() if size > 1 or name in always}
    if not axes:
        return None
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _wait_as_all(mesh)
    for name, joined in JOINTS.items() if joins else ():
        if own := tuple(axis for axis in joined if axis in axes):
            _wait_as_all(mesh[own]._flatten(name))  # torch has no public way to them
    return mesh


def _wait_as_all(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the time-out of the group of all processes; torch has a default for them. Local."""
    device = torch.device(mesh.device_type)
    options: Any = getattr(dist.distributed_c10d._get_default_group()._get_backend(device), "options", None)
    for group in mesh.get_all_groups() if options is not None else ():
        backend: Any = group._get_backend(device)
        backend._set_default_timeout(options._timeout)


def spreading_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which weights are spread: that of parts, or copies times parts. Processes that have parts of the
    same sequences have different parts of the weights too. Collective where there are such.
    """
    from torch.distributed.device_mesh import DeviceMesh

    names = mesh.mesh_dim_names or ()
    spread = tuple(axis for axis in JOINTS["dp_shard_cp"] if axis in names)
    if len(spread) == 1:
        return mesh[(REPLICATE, SHARD)] if REPLICATE in names else mesh[SHARD]
    # Not by the joint's name: torch is to stop finding it so.
    joint = mesh[spread]._flatten("dp_shard_cp")
    return DeviceMesh._concatenate([mesh[REPLICATE], joint]) if REPLICATE in names else joint
