"""How many samples a batch holds, and how many batches a loader, and of which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler

from ..distributed.errors import DataError
from ..distributed.nested import named_leaves
from .around import own_sampler


class AmbiguousBatchSizeError(DataError):
    """The parts of a batch have different lengths, so that its number of samples can't be told."""


def find_batch_size(batch: Any) -> int | None:
    """The number of samples in a batch: the common first dimension of its tensors and arrays.

    Args:
        batch: a tensor of shape (samples, ...), or nested sequences, mappings and objects that hold some. Lists of
            strings count by their length. 0-d tensors and plain scalars are passed over.
    Returns:
        The number of samples, None where nothing in the batch has a first dimension.
    Raises:
        AmbiguousBatchSizeError: parts disagree; says how.
    """
    # The two shapes that most loaders give, without a walk.
    if isinstance(batch, Tensor):
        return _length(batch)
    if type(batch) in (tuple, list) and len(batch) == 2:
        first, second = batch
        if type(first) is Tensor and type(second) is Tensor and first.ndim and second.ndim:
            size = first.shape[0]
            if second.shape[0] == size:
                return size
    return _from_parts(batch)


def _from_parts(batch: Any) -> int | None:
    lengths = {path: length for path, leaf in named_leaves(batch, "batch") if (length := _length(leaf)) is not None}
    sizes = set(lengths.values())
    if len(sizes) > 1:
        found = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise AmbiguousBatchSizeError(
            f"the batch's number of samples can't be told: {found}. "
            "Pass batch_size= to self.log, or override `Task.count_samples(batch)`."
        )
    return sizes.pop() if sizes else None


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.ndim else None
    if isinstance(leaf, Sequence):
        return None if isinstance(leaf, (str, bytes)) else len(leaf)  # texts
    shape = getattr(leaf, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None


def loader_length(loader: Any) -> int | None:
    """Batches in one pass, None where the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # what `len` raises where there is none
        return None


def batch_sizes(loader: Any) -> list[int] | None:
    """Samples in each batch of a pass, None where the loader does not tell them before it."""
    if isinstance(loader, (list, tuple)):
        try:
            found = [find_batch_size(batch) for batch in loader]
        except AmbiguousBatchSizeError:
            return None
        return None if None in found else [size for size in found if size is not None]
    batches, size = own_sampler(getattr(loader, "batch_sampler", None)), getattr(loader, "batch_size", None)
    if size is None or type(batches) is not BatchSampler:  # another one may give batches of any sizes
        return None
    samples = loader_length(batches.sampler)
    return None if samples is None else [min(size, samples - size * index) for index in range(len(batches))]
