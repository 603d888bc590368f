"""The processes of one pipeline, and those that have the same stages of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import watch
from ..distributed.errors import DistributedError
from ..distributed.exchange import exchange
from ..distributed.meshes import REPLICATE, SEQUENCE, SHARD, TENSOR, spreading_axes
from ..distributed.shares import DataShare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PASSES = "pipeline"
"""What the processes call it that all of them are at the same batch."""


def pipeline_share(process_index: int, num_processes: int, num_shares: int, sequence: int) -> DataShare:
    """Which share of the data a process gets: neighbours get the same batches, and come to the same loss. Local.

    Args:
        process_index: of this process.
        num_processes: a multiple of `num_shares * sequence`.
        num_shares: of the data.
        sequence: parts of each sequence, which have losses of their own.
    """
    size = num_processes // num_shares
    return DataShare(
        num_processes=num_shares, process_index=process_index // size, num_peers=size, peer=process_index % size,
        num_twins=size // sequence,
    )  # fmt: skip


class PipelineGroups:
    """Groups of processes: one for each pipeline, and one for each place in them. Making them is collective.

    Processes are in a grid of copies x shards x sequence x places x tensor, of which the last are neighbours. Those of
    a pipeline differ in their place alone.

    Args:
        copies: of the model.
        shards: pipelines that a copy is spread over.
        sequence: pipelines that have parts of the same sequences; a copy is spread over them as well.
        tensor: pipelines over which layers are cut; the number of processes is a multiple of the four.
        device: where this process computes.
    """

    def __init__(self, copies: int, shards: int, sequence: int, tensor: int, device: torch.device) -> None:
        grid = torch.arange(dist.get_world_size()).view(copies, shards * sequence, -1, tensor)
        self.size = grid.shape[2]
        """How many processes a pipeline has."""
        copy, shard, self.place, part = (grid == dist.get_rank()).nonzero()[0].tolist()
        """Where in its pipeline this process is."""
        self.is_first = copy == shard == part == 0
        """Whether no process before it has the same layers."""
        self.num_parts = tensor
        """Over how many processes layers are cut."""
        self.pipeline: dist.ProcessGroup | None = None
        """The processes of this one's pipeline; None: all."""
        self.peers: dist.ProcessGroup | None = None
        """Those that get the same batches; None: all."""
        self.alike: dist.ProcessGroup | None = None
        """Those with the same place and part of layers, which have losses of their own; None: this process alone."""
        self.same_place: dist.ProcessGroup | None = None
        """Those at this place, where layers are cut."""
        self.mesh: DeviceMesh | None = None
        """Those at this place, where their weights are spread or cut: the axes of copies, of parts of weights (in any
        case) and of the tensor, where there are several; None: each process has them whole."""
        self.sequence: DeviceMesh | None = None
        """Those that have parts of the same sequences; None: there is no such axis."""
        if copies * shards * sequence * tensor == 1:
            return
        with watch.collective("groups of pipelines"), watch.connections_noted():
            self.pipeline = _own_group(grid.transpose(2, 3).reshape(-1, self.size), device)
            self.peers = _own_group(grid.reshape(copies * shards, -1), device)
            self.alike = _own_group(grid.flatten(0, 1).flatten(1).T, device)
            if shards * sequence * tensor > 1:
                self.mesh = self._mesh(grid, device)
            if sequence > 1:
                self.sequence = _axis(
                    grid.view(copies * shards, sequence, -1).mT.reshape(-1, sequence), SEQUENCE, device
                )
            if tensor > 1:
                self.same_place = _own_group(grid.movedim(2, 0).reshape(self.size, -1), device)

    @property
    def spread(self) -> DeviceMesh:
        """The axes of the mesh over which weights are spread."""
        assert self.mesh is not None
        return spreading_axes(self.mesh)

    @property
    def tensor(self) -> DeviceMesh | None:
        """The axis of the mesh over which layers are cut; None: there is none."""
        is_cut = self.mesh is not None and TENSOR in (self.mesh.mesh_dim_names or ())
        return self.mesh[TENSOR] if is_cut else None  # type: ignore[index]

    def _mesh(self, grid: Tensor, device: torch.device) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        axes = {REPLICATE: 0, SHARD: 1, TENSOR: 3}
        kept = {name: axis for name, axis in axes.items() if grid.shape[axis] > 1 or name == SHARD}
        groups = [_own_group(grid.movedim(axis, -1).reshape(-1, grid.shape[axis]), device) for axis in kept.values()]
        own = grid[:, :, self.place].reshape([grid.shape[axis] for axis in kept.values()]).contiguous()
        return DeviceMesh.from_group(groups, device.type, own, mesh_dim_names=tuple(kept))

    def rank_of(self, place: int) -> int:
        """The first process at a place. Local."""
        return place * self.num_parts

    def compare(self, num_samples: int) -> None:
        """See that all that get the same batches are at one of as many samples, or all without one. Collective among
        them.

        Raises:
            DistributedError: on all of them: some have left a batch out, or they have different ones.
        """
        told = self._tell(num_samples)
        if 0 in told and any(told):
            begin = dist.get_rank() // len(told) * len(told)
            without = ", ".join(str(begin + place) for place, size in enumerate(told) if not size)
            raise DistributedError(
                f"a batch was left out on process {without} alone, and with strategy='pipeline' it goes through all. "
                "Let callbacks and the task leave batches out, or end an epoch, on all processes alike."
            )
        if len(set(told)) > 1:
            raise DistributedError(
                f"the processes of a pipeline have batches of {told} samples, and have to get the same ones. Pass a "
                "loader that is not shared yet, or give the same batches to all of them."
            )

    def _tell(self, value: int) -> list[int]:
        """What each process says that gets the same batches. Collective among them."""
        if self.peers is None:
            return exchange(value, _PASSES)
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self.peers))]
        with watch.collective(_PASSES):
            dist.all_gather(parts, torch.tensor([value]), group=self.peers)
        return [int(each) for each in parts]

    def sum_norms(self, own: Tensor, norm_type: float) -> Tensor:
        """The norm over all stages of this pipeline, a scalar. Collective in the pipeline.

        Args:
            own: that of this process's stages, a scalar in float32 on the device.
            norm_type: its order.
        """
        parts = [torch.zeros_like(own) for _ in range(self.size)]
        with watch.collective("norm of gradients"):
            dist.all_gather(parts, own, group=self.pipeline)
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        return total


def _axis(members: Tensor, name: str, device: torch.device) -> DeviceMesh:
    """A mesh of this process's row of ranks. Collective."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(_own_group(members, device), device.type, mesh_dim_names=(name,))


def _own_group(members: Tensor, device: torch.device) -> dist.ProcessGroup:
    """Make a group of each row of ranks, with the default group's time-out, and give this process's. Collective."""
    world = dist.distributed_c10d._get_default_group()
    timeout = world._get_backend(device).options._timeout  # which torch would not take over
    groups: list[dist.ProcessGroup] = [dist.new_group(each, timeout=timeout) for each in members.tolist()]
    return next(group for group, each in zip(groups, members.tolist(), strict=True) if dist.get_rank() in each)
