"""How many samples a batch holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..distributed.errors import DataError


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
        return batch.shape[0] if batch.ndim else None
    if type(batch) in (tuple, list) and len(batch) == 2:
        first, second = batch
        if type(first) is Tensor and type(second) is Tensor and first.ndim and second.ndim:
            size = first.shape[0]
            if second.shape[0] == size:
                return size
    return _from_parts(batch)


def _from_parts(batch: Any) -> int | None:
    lengths: dict[str, int] = {}
    _collect(batch, "batch", lengths)
    sizes = set(lengths.values())
    if len(sizes) > 1:
        found = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise AmbiguousBatchSizeError(
            f"the batch's number of samples can't be told: {found}. "
            "Pass batch_size= to self.log, or override `Task.count_samples(batch)`."
        )
    return sizes.pop() if sizes else None


def _collect(part: Any, path: str, lengths: dict[str, int]) -> None:
    if isinstance(part, (str, bytes)) or part is None:
        return
    if isinstance(part, Mapping):
        for key, value in part.items():
            _collect(value, f"{path}[{key!r}]", lengths)
    elif isinstance(part, Sequence):
        if part and all(isinstance(item, (str, bytes)) for item in part):
            lengths[path] = len(part)
            return
        for index, value in enumerate(part):
            _collect(value, f"{path}[{index}]", lengths)
    elif hasattr(part, "__dataclass_fields__"):
        for name in part.__dataclass_fields__:
            _collect(getattr(part, name), f"{path}.{name}", lengths)
    else:
        shape = getattr(part, "shape", None)
        if shape is not None and len(shape):
            lengths[path] = int(shape[0])
