"""The names that users of Accelerate import from `accelerate.data_loader`."""

from __future__ import annotations

from .data.loader import PreparedLoader as DataLoaderShard
from .data.samplers import SeedableRandomSampler
from .data.samplers import SkippingSampler as SkipBatchSampler
from .data.shards import BatchSamplerShard, IterableDatasetShard
from .data.skip import skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "skip_first_batches",
]
