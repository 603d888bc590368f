"""The processes of one pipeline, and those that have the same stages of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import watch
from ..distributed.exchange import exchange
from ..distributed.meshes import REPLICATE, SHARD
from ..distributed.shares import DataShare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PASSES = "pipeline"
"""What the processes call it that all of them are at the same batch."""


def pipeline_share(process_index: int, num_processes: int, num_pipelines: int) -> DataShare:
    """Which share of the data a process gets: neighbours are one pipeline, of which all come to the same loss. Local.

    Args:
        process_index: of this process.
        num_processes: a multiple of `num_pipelines`.
        num_pipelines: side by side.
    """
    size = num_processes // num_pipelines
    return DataShare(
        num_processes=num_pipelines, process_index=process_index // size, num_peers=size, peer=process_index % size,
        num_twins=size,
    )  # fmt: skip


class PipelineGroups:
    """Groups of processes: one for each pipeline, and one for each place in them. Making them is collective.

    Args:
        copies: of the model.
        shards: pipelines that a copy is spread over; the number of processes is a multiple of `copies * shards`.
        device: where this process computes.
    """

    def __init__(self, copies: int, shards: int, device: torch.device) -> None:
        count = dist.get_world_size()
        self.size = count // (copies * shards)
        """How many processes a pipeline has."""
        number, self.place = divmod(dist.get_rank(), self.size)
        """Where in its pipeline this process is."""
        self.is_first = number == 0
        """Whether its pipeline is the first."""
        self.copy = number // shards
        """Of which copy of the model it has a part."""
        self.pipeline: dist.ProcessGroup | None = None
        """The processes of this one's pipeline; None: all."""
        self.alike: dist.ProcessGroup | None = None
        """Those at this place in each pipeline; None: this process alone."""
        self.spread: DeviceMesh | None = None
        """Those over which the weights of this place's layers are spread: `shards`, or `copies` times `shards`; None:
        each process has them whole."""
        if copies * shards == 1:
            return
        with watch.collective("groups of pipelines"), watch.connections_noted():
            self.pipeline = _own_group(torch.arange(count).view(-1, self.size), device)
            self.alike = _own_group(torch.arange(count).view(-1, self.size).T, device)
            if shards > 1:
                self.spread = self._spread(copies, shards, device)

    def _spread(self, copies: int, shards: int, device: torch.device) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        assert self.alike is not None
        if copies == 1:
            return DeviceMesh.from_group(self.alike, device.type, mesh_dim_names=(SHARD,))
        ranks = torch.arange(dist.get_world_size()).view(copies, shards, self.size)
        twins = _own_group(ranks.permute(1, 2, 0).reshape(-1, copies), device)
        parts = _own_group(ranks.permute(0, 2, 1).reshape(-1, shards), device)
        own = ranks[:, :, self.place].contiguous()
        return DeviceMesh.from_group([twins, parts], device.type, own, mesh_dim_names=(REPLICATE, SHARD))

    def tell(self, value: int) -> list[int]:
        """What each process of this pipeline says, the first stage's first. Collective in the pipeline."""
        if self.pipeline is None:
            return exchange(value, _PASSES)
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with watch.collective(_PASSES):
            dist.all_gather(parts, torch.tensor([value]), group=self.pipeline)
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


def _own_group(members: Tensor, device: torch.device) -> dist.ProcessGroup:
    """Make a group of each row of ranks, with the default group's time-out, and give this process's. Collective."""
    world = dist.distributed_c10d._get_default_group()
    timeout = world._get_backend(device).options._timeout  # which torch would not take over
    groups: list[dist.ProcessGroup] = [dist.new_group(each, timeout=timeout) for each in members.tolist()]
    return next(group for group, each in zip(groups, members.tolist(), strict=True) if dist.get_rank() in each)
