"""The values of one evaluation batch from every process, each sample once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed.nested import flatten, named_leaves
from ..distributed.operations import gather, gather_object
from ..distributed.shares import DataShare


def gather_batch(data: Any, real_samples: int | None, share: DataShare, *, as_objects: bool = False) -> Any:
    """Every process's values of one batch, without those of samples that were added to make processes even, and once
    where processes have the same batch. Collective.

    Args:
        data: nested tensors, one row per sample; values without a dimension are one per process, and are all kept.
            Where a leaf is no tensor, or with `as_objects`: a list of any objects, one per sample.
        real_samples: samples of this batch over all processes, the added ones not counted; None: none was added.
        share: of the data on this process.
        as_objects: whether the values are sent as objects although they are tensors.
    """
    if as_objects or not all(isinstance(leaf, Tensor) for _, leaf in named_leaves(data)):
        gathered = gather_object(data if share.peer == 0 else [])
        return gathered[:real_samples] if isinstance(gathered, list) else gathered
    gathered = gather(data)
    if share.num_peers > 1:
        gathered = _of_first_peers(gathered, share)
    return gathered if real_samples is None else _first_rows(gathered, data, real_samples)


def _of_first_peers(gathered: Any, share: DataShare) -> Any:
    """What one process of those with the same batch gave, of each gathered tensor."""
    rows, rebuilt = flatten(gathered)
    count = share.num_processes * share.num_peers
    return rebuilt([torch.cat(share.by_batches(row.chunk(count))) for _, row in rows])  # type: ignore[arg-type]


def _first_rows(gathered: Any, data: Any, count: int) -> Any:
    """The first rows of each gathered tensor, but all of one that had no dimension before."""
    rows, rebuilt = flatten(gathered)
    own, _ = flatten(data)
    return rebuilt([row[:count] if leaf.dim() else row for (_, row), (_, leaf) in zip(rows, own, strict=True)])
