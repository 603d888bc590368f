"""The source text of the Python standard library as bytes: real text that every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

FILE_START = 256
"""The token before a file's first byte; tokens 0 to 255 are the bytes."""
VOCABULARY = 257
IGNORED = -1
"""The target where a sequence is filled up: no loss is taken there."""
HELD_OUT = 10
"""Every so many-th file is for validation."""


class Loaders(TypedDict):
    """The loaders of the recipe, by stage."""

    train: DataLoader[tuple[Tensor, ...]]
    val: DataLoader[tuple[Tensor, ...]]


def library_files(folder: Path, max_bytes: int) -> list[bytes]:
    """The `*.py` files of the folder itself in the order of their names, until `max_bytes` are reached."""
    texts: list[bytes] = []
    left = max_bytes
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()[:left]
        left -= len(text)
        if text:
            texts.append(text)
    return texts


def sequences(texts: Sequence[bytes], context: int) -> TensorDataset:
    """Cut texts into rows so that each byte is predicted exactly once.

    Args:
        texts: whole files. A row never spans two of them, so the last row of a file is short and filled up.
        context: tokens per row.
    Returns:
        Inputs and targets, int64 of shape (rows, context). The target of position i is the byte that follows it.
    """
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for text in texts:
        tokens = torch.tensor([FILE_START, *text])
        inputs += _rows(tokens[:-1], context, fill=FILE_START)
        targets += _rows(tokens[1:], context, fill=IGNORED)
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


def _rows(tokens: Tensor, context: int, fill: int) -> list[Tensor]:
    rows = -(-len(tokens) // context)
    filled = torch.full((rows * context,), fill)
    filled[: len(tokens)] = tokens
    return [*filled.view(rows, context)]


def library_loaders(
    batch_size: int = 32, context: int = 128, max_bytes: int = 2_000_000, folder: str | None = None
) -> Loaders:
    """Loaders of (inputs, targets) rows; every tenth file is held out for validation.

    Args:
        batch_size: rows per batch.
        context: tokens per row.
        max_bytes: how much text is read in all.
        folder: where the `*.py` files lie; by default the standard library of this Python.
    """
    texts = library_files(Path(folder or sysconfig.get_path("stdlib")), max_bytes)
    val = texts[HELD_OUT - 1 :: HELD_OUT]
    train = [text for index, text in enumerate(texts, start=1) if index % HELD_OUT]
    return {
        "train": DataLoader(sequences(train, context), batch_size=batch_size, shuffle=True),
        "val": DataLoader(sequences(val, context), batch_size=batch_size),
    }
