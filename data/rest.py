"""What is left of a pass behind so many samples or batches, to be dealt in other batches or to other processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..distributed.errors import DataError
from .around import DatasetAround
from .dealing import LoaderDealer
from .samplers import SamplerAround, SkippingSampler, index_source, with_options
from .seeded import NumberedSampler, SeededLoader
from .shards import BatchSamplerShard, DealtSampler, IterableDatasetShard
from .skipping import batches_from, discard, reads_by_index
from .starting import is_plain

Unit: TypeAlias = Literal["samples", "batches"]
"""What is counted: samples, or batches as the user's own loader gives them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the batches of a pass, as a loader deals them, begin."""

    batch: int = 0
    """The number of the first of them in this process's pass."""
    unit: Unit = "batches"
    count: int = 0
    """Samples or batches of all processes before it."""


def rest_of(loader: Any, origin: Origin) -> Any:
    """A loader of what is left of a pass, in batches as this loader makes and deals them. It is not changed.

    Args:
        loader: any iterable of batches; what shares it among processes may be around it.
        origin: where the rest begins.
    Raises:
        DataError: its samples can't be counted.
    """
    if isinstance(loader, LoaderDealer):
        per_round = 1 if loader.split_batches else loader.num_processes
        return _with(loader, loader=rest_of(loader.loader, replace(origin, batch=origin.batch * per_round)))
    if reads_by_index(loader):
        name, source = index_source(loader)
        return with_options(loader, **{name: _rest_of_indices(source, origin, name == "batch_sampler")})
    if origin.unit == "batches":
        if isinstance(loader, SeededLoader):
            return _with(loader, loader=rest_of(loader.loader, origin), first=origin.batch)
        return _RestOfLoader(loader, origin.count)
    if not isinstance(loader, DataLoader) or loader.num_workers:
        why = "its workers read parts of it" if isinstance(loader, DataLoader) else "only its batches can be counted"
        raise DataError(
            f"the pass can't go on behind {origin.count} samples in other batches or on another number of processes: "
            f"a {type(loader).__name__} can't skip them, since {why}. Use the batch size and the number of processes "
            "of before, or a dataset that is read by indices."
        )
    if isinstance(loader.dataset, IterableDatasetShard):
        shard = _with(loader.dataset, num_skipped=origin.count)  # every process reads the whole
        return with_options(loader, dataset=shard, collate_fn=_with(loader.collate_fn, shard=shard))
    return with_options(loader, dataset=_RestOfStream(loader.dataset, origin.count))


def dealer_of(loader: Any) -> Any:
    """What deals a loader out: itself, its index source, or its dataset; None where it was not shared."""
    if isinstance(loader, LoaderDealer):
        return loader
    if not isinstance(loader, DataLoader):
        return None
    parts = [index_source(loader)[1], loader.dataset]
    while parts:
        part = parts.pop(0)
        if isinstance(part, (BatchSamplerShard, DealtSampler, IterableDatasetShard)):
            return part
        inner = getattr(part, "sampler" if isinstance(part, SamplerAround) else "dataset", None)
        if isinstance(part, (SamplerAround, DatasetAround)):
            parts.append(inner)
    return None


def _with(thing: Any, **changes: Any) -> Any:
    """A copy with other attributes."""
    clone = copy.copy(thing)
    for name, value in changes.items():
        setattr(clone, name, value)
    return clone


def _rest_of_indices(source: Any, origin: Origin, batched: bool) -> Any:
    def inside(inner: Any, num_more: int = 0) -> Any:
        return _rest_of_indices(inner, replace(origin, count=origin.count + num_more), batched)

    if isinstance(source, NumberedSampler):
        return _with(source, sampler=inside(source.sampler), first=origin.batch)
    if isinstance(source, BatchSamplerShard):
        return _with(source, batch_sampler=inside(source.batch_sampler))
    if isinstance(source, DealtSampler):
        return _with(source, sampler=inside(source.sampler))
    if origin.unit == "batches" or not batched:
        return SkippingSampler(source, origin.count)
    if isinstance(source, SkippingSampler) and source.batch_size is not None:
        return inside(source.sampler, source.num_skipped * source.batch_size)
    if is_plain(source, "BatchSampler"):
        return BatchSampler(SkippingSampler(source.sampler, origin.count), source.batch_size, source.drop_last)
    raise DataError(
        f"the pass can't go on behind {origin.count} samples in other batches or on another number of processes: the "
        f"batches of a {type(source).__name__} can't be cut anew. Use the batch size and the number of processes of "
        "before, or torch's BatchSampler."
    )


class _RestOfStream(DatasetAround, IterableDataset[Any]):
    """An iterable dataset without its first samples, which are read and thrown away."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.dataset)
        discard(iterator, self.count, "samples")
        return iterator


class _RestOfLoader:
    """An iterable of batches without its first ones, which are read and thrown away."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader = loader
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return batches_from(self.loader, self.count)
