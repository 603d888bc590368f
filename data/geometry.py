"""How a loader's batches are made and dealt, and so how many samples are behind a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from .around import own_sampler
from .described import LoaderAround
from .rest import Origin
from .samplers import SkippingSampler, index_source
from .shards import NativeShard, sample_count, undealt
from .sizes import loader_length
from .skipping import reads_by_index
from .starting import is_plain


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a loader's batches are made and dealt: as long as it stays, positions are numbers of batches."""

    kind: str
    batch_size: int | None
    num_processes: int
    split_batches: bool
    num_workers: int
    num_samples: int | None
    """In a pass over all processes."""
    batches_per_round: int | None
    """Batches of the user's loader in each round of all processes; None where they have no common order."""
    samples_per_round: int | None

    def samples(self, batch: int, origin: Origin) -> int | None:
        """Samples of all processes behind `batch` batches of this one."""
        if self.samples_per_round is None or (origin.count and origin.unit != "samples"):
            return None
        done = origin.count + (batch - origin.batch) * self.samples_per_round
        return done if self.num_samples is None else min(done, self.num_samples)

    def batches(self, batch: int, origin: Origin) -> int | None:
        """Batches of the user's loader behind `batch` batches of this process."""
        if self.batches_per_round is None or (origin.count and origin.unit != "batches"):
            return None
        return origin.count + (batch - origin.batch) * self.batches_per_round


def dealing_of(around: LoaderAround) -> Dealing:
    """How a loader's batches are made and dealt."""
    own: Any = around.loader
    while not isinstance(own, DataLoader) and (inner := getattr(own, "loader", None)) is not None:
        own = inner
    is_loader, by_index = isinstance(own, DataLoader), reads_by_index(own)
    # Nobody knows what the other processes have of what was shared elsewhere.
    per_round = None if isinstance(around.dealer, NativeShard) else 1 if around.splits_batches else around.num_processes
    samples, num_samples = around.total_batch_size, around.total_dataset_length if is_loader else None
    if by_index:
        name, source = index_source(own)
        samples, num_samples = _count_indices(source, name == "batch_sampler", samples)
    if is_loader and own.batch_sampler is None:
        samples = per_round
    return Dealing(
        kind="indices" if by_index else "stream" if is_loader else "batches",
        batch_size=around.batch_size if is_loader else None,
        num_processes=around.num_processes,
        split_batches=around.splits_batches,
        num_workers=own.num_workers if is_loader and not by_index else 0,
        num_samples=num_samples,
        batches_per_round=per_round,
        samples_per_round=samples if is_loader and per_round is not None else None,
    )


def _count_indices(source: Any, batched: bool, samples: int | None) -> tuple[int | None, int | None]:
    """Samples in a round, if batches can be cut anew behind any of them, and in a pass."""
    source = undealt(own_sampler(source))
    if not batched:
        return None, loader_length(source)
    num_samples = sample_count(source)
    while isinstance(source, SkippingSampler):
        source = source.sampler
    return samples if is_plain(source, "BatchSampler") else None, num_samples
