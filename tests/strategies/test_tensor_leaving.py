"""Batches that one of two processes leaves out, which compute parts of the same pass; and how long its groups wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright.distributed.errors import DistributedError
from loopwright.distributed.meshes import MeshSizes, build_mesh
from loopwright.distributed.shares import DataShare
from loopwright.strategies import tensor_leaving
from loopwright.strategies.tensor_leaving import Leaving

from .sharded import fit, loader
from .test_fsdp_trainer import Gaps, LeavesOut
from .test_tensor_parallel import TENSOR

Run = Callable[..., list[Any]]


def _leaves() -> None:
    index = dist.get_rank()
    leaving = Leaving(DataShare(num_processes=1, process_index=0, num_peers=2, peer=index, num_twins=2))
    leaving.passed()
    leaving.leave()
    leaving.leave()
    dist.barrier()
    tensor_leaving.PATIENCE_SECONDS, before = 0.2, tensor_leaving.PATIENCE_SECONDS
    text = "this process has left a batch without a loss, and 1 of the 2 that compute parts of the same batch have not"
    try:
        if index == 1:
            with pytest.raises(DistributedError, match=text):
                leaving.leave()
    finally:
        tensor_leaving.PATIENCE_SECONDS = before


def test_peers_leave_together(two_processes: Run) -> None:
    two_processes(_leaves)


def _leaves_alone() -> None:
    tensor_leaving.PATIENCE_SECONDS = 1.0
    torch.manual_seed(1)
    fit(Gaps(f"..{'x' if dist.get_rank() else '.'}....."), loader(48, 6), callbacks=[LeavesOut()], strategy=TENSOR)


@pytest.mark.slow
def test_one_that_leaves_alone_ends_both(two_processes: Run) -> None:
    with pytest.raises(AssertionError, match="process 0 raised") as caught:
        two_processes(_leaves_alone)
    text = str(caught.value)
    assert "DistributedError: this process has left a batch without a loss, and 1 of the 2 that compute parts" in text
    assert "PeerFailedError: process 1 failed first" in text


def _waits() -> set[timedelta]:
    mesh = build_mesh(MeshSizes(shard=1, tensor=2), "cpu", always=("dp_shard",))
    assert mesh is not None
    cpu = torch.device("cpu")
    groups: list[Any] = [dist.group.WORLD, *mesh.get_all_groups()]
    return {group._get_backend(cpu).options._timeout for group in groups}


def test_groups_of_a_mesh_wait_as_long_as_that_of_all(two_processes: Run) -> None:
    for waits in two_processes(_waits):
        assert len(waits) == 1
