"""Dealing one process its share of a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import DataError
from .nested import honor_mapping, honor_type


def share_of(inputs: Any, index: int, count: int, apply_padding: bool = False) -> Any:
    """What one of several processes gets of the inputs; those of the first ones are longer by one where it must be.

    Args:
        inputs: a list, a tuple, a tensor (split in its first dimension), a mapping of these, all equally long, or a
            `datasets.Dataset`. Anything else is not split, and nothing is changed.
        index: of the process.
        count: of all processes. With one, the inputs themselves are returned.
        apply_padding: make all shares equally long, by the last item; of nothing every process gets nothing.
    Raises:
        DataError: the values of a mapping differ in length.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"split_between_processes: the values differ in length: {lengths}. Give all the same length."
            )
        return honor_mapping(
            inputs, {key: share_of(value, index, count, apply_padding) for key, value in inputs.items()}
        )
    if not isinstance(inputs, (list, tuple, torch.Tensor)) and not callable(getattr(inputs, "select", None)):
        return inputs
    indices = _indices(len(inputs), index, count, apply_padding)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, (list, tuple)):
        return honor_type(inputs, (inputs[i] for i in indices))
    return inputs.select(indices)


def _indices(length: int, index: int, count: int, apply_padding: bool) -> list[int]:
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    indices = list(range(start, start + size + (index < longer)))
    if apply_padding and length:
        indices += [length - 1] * (-(-length // count) - len(indices))
    return indices
