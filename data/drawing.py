"""Whether reading data may draw from the random states that everything in a process shares."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from .combined import CombinedLoader
from .dealing import LoaderDealer
from .described import LoaderAround
from .samplers import SeedableRandomSampler, SkippingSampler
from .shards import undealt
from .starting import is_plain


def reads_here(loader: Any) -> bool:
    """Whether reading a batch may draw from this process's random states."""
    if isinstance(loader, CombinedLoader):
        return any(map(reads_here, loader.loaders))
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0 and dataset_may_draw(loader)
    if isinstance(loader, LoaderDealer):
        return reads_here(loader.loader)
    return not isinstance(loader, (list, tuple, range, LoaderAround))


def dataset_may_draw(loader: DataLoader[Any]) -> bool:
    """Whether a loader's dataset or collate function may draw random numbers."""
    return loader.collate_fn not in (default_collate, default_convert) or _may_draw(loader.dataset)


def _may_draw(dataset: Any) -> bool:
    kind = type(dataset)
    if kind is Subset:
        return _may_draw(dataset.dataset)
    if kind in (ConcatDataset, StackDataset):
        parts = dataset.datasets
        return any(map(_may_draw, parts.values() if isinstance(parts, dict) else parts))
    return kind not in (TensorDataset, Tensor, list, tuple, range)


def sampler_may_draw(sampler: Any) -> bool:
    """Whether a sampler may draw from the random states that everything shares, and not by a generator of its own."""
    sampler = undealt(sampler)
    if is_plain(sampler, "BatchSampler") or isinstance(sampler, SkippingSampler):
        return sampler_may_draw(sampler.sampler)
    if is_plain(sampler, "RandomSampler") or type(sampler) in (SubsetRandomSampler, WeightedRandomSampler):
        return sampler.generator is None
    known = (SequentialSampler, SeedableRandomSampler, DistributedSampler, range, list, tuple)
    return type(sampler) not in known
