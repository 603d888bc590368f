"""Predictions as JSON lines: one line for each sample where the outputs have samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.atomic import whole_file


def write_predictions(outputs: Iterable[Any], file: Path) -> int:
    """Write the outputs of `predict_step`, whole or not at all, and return the number of lines.

    Args:
        outputs: one per batch. A tensor, or a mapping, tuple or list of tensors of one length, gives one line per
            entry of the first dimension; anything else one line.
        file: an older one is replaced.
    """
    count = 0
    with whole_file(file) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for output in outputs:
            for row in rows_of(output):
                stream.write(json.dumps(_plain(row)) + "\n")
                count += 1
    return count


def count_rows(outputs: Iterable[Any]) -> int:
    """The number of lines that `write_predictions` would write."""
    return sum(1 for output in outputs for _ in rows_of(output))


def rows_of(output: Any) -> Iterator[Any]:
    """The samples of one batch's output; the output itself where it has none."""
    columns = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(output, torch.Tensor):
        yield from (output.unbind() if output.dim() else [output])
    elif isinstance(columns, tuple | list) and _have_one_length(columns):
        for row in zip(*columns, strict=True):
            yield dict(zip(output, row, strict=True)) if isinstance(output, Mapping) else list(row)
    else:
        yield output


def _have_one_length(columns: tuple[Any, ...] | list[Any]) -> bool:
    if not all(isinstance(column, torch.Tensor) and column.dim() for column in columns):
        return False
    return len({len(column) for column in columns}) == 1


def _plain(value: Any) -> Any:
    """What JSON can hold; objects that it can't hold become their text."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
