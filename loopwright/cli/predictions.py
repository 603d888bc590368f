"""Predictions as JSON lines: one line for each sample where the outputs have samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from ..distributed.atomic import whole_file


class PredictionWriter:
    """A writer for `trainer.predict`: it keeps no outputs, so that memory does not grow with the data.

    Args:
        stream: where the lines go; None to count them only.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.count = 0
        """Lines so far."""

    def __call__(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take what `predict_step` returned for one batch."""
        for row in rows_of(outputs):
            self.count += 1
            if self.stream is not None:
                self.stream.write(line_of(row))


@contextmanager
def prediction_writer(file: Path | None) -> Iterator[PredictionWriter]:
    """A context with a writer to a file, which appears whole at its end and replaces an older one; None only counts."""
    if file is None:
        yield PredictionWriter()
        return
    with whole_file(file) as temporary, temporary.open("w", encoding="utf-8") as stream:
        yield PredictionWriter(stream)


def rows_of(output: Any) -> Iterator[Any]:
    """The samples of one batch's output; the output itself where it has none.

    A tensor of shape (samples, ...) gives its entries; a mapping, tuple or list of tensors of one length gives a
    mapping or list for each sample.
    """
    if isinstance(output, torch.Tensor) and output.dim():
        yield from output.unbind()
    elif isinstance(output, Mapping) and _have_one_length(list(output.values())):
        for row in zip(*output.values(), strict=True):
            yield dict(zip(output, row, strict=True))
    elif isinstance(output, tuple | list) and _have_one_length(output):
        yield from map(list, zip(*output, strict=True))
    else:
        yield output


def line_of(row: Any) -> str:
    """One row as a line of JSON."""
    return json.dumps(_plain(row)) + "\n"


def _have_one_length(columns: Sequence[Any]) -> bool:
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
