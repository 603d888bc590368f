"""The processes of one pipeline, and those that have the same stages of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import watch
from ..distributed.exchange import exchange
from ..distributed.shares import DataShare

_PASSES = "pipeline"
"""What the processes call it that all of them are at the same batch."""


def pipeline_share(process_index: int, num_processes: int, copies: int) -> DataShare:
    """Which share of the data a process gets: neighbours are one pipeline, of which all come to the same loss. Local.

    Args:
        process_index: of this process.
        num_processes: a multiple of `copies`.
        copies: pipelines side by side.
    """
    size = num_processes // copies
    return DataShare(
        num_processes=copies, process_index=process_index // size, num_peers=size, peer=process_index % size,
        num_twins=size,
    )  # fmt: skip


class PipelineGroups:
    """Groups of processes: one for each pipeline, and one for each place in them. Making them is collective.

    Args:
        copies: pipelines side by side; the number of processes is a multiple of it.
        device: where this process computes.
    """

    def __init__(self, copies: int, device: torch.device) -> None:
        count = dist.get_world_size()
        self.size = count // copies
        """How many processes a pipeline has."""
        self.copies = copies
        self.copy, self.place = divmod(dist.get_rank(), self.size)
        """Which pipeline this process is in, and where in it."""
        self.pipeline: dist.ProcessGroup | None = None
        """The processes of this one's pipeline; None: all."""
        self.alike: dist.ProcessGroup | None = None
        """Those at this place in each pipeline; None: this process alone."""
        if copies == 1:
            return
        with watch.collective("groups of pipelines"), watch.connections_noted():
            pipelines = [list(range(begin, begin + self.size)) for begin in range(0, count, self.size)]
            places = [list(range(place, count, self.size)) for place in range(self.size)]
            self.pipeline = _own_group(pipelines, device)
            self.alike = _own_group(places, device)

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


def _own_group(members: Sequence[list[int]], device: torch.device) -> dist.ProcessGroup:
    """Make a group of each of these, with the default group's time-out, and give this process's. Collective."""
    world = dist.distributed_c10d._get_default_group()
    timeout = world._get_backend(device).options._timeout  # which torch would not take over
    groups: list[dist.ProcessGroup] = [dist.new_group(each, timeout=timeout) for each in members]
    return next(group for group, each in zip(groups, members, strict=True) if dist.get_rank() in each)
