"""`StoredTensor`: a tensor on disk, of which as much is read as is needed, when it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .sharded import is_sharded, parts_of


class Kept(Protocol):
    """What is known of a tensor on disk."""

    @property
    def dtype(self) -> torch.dtype:
        """Its number format."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""


class PartReader(Protocol):
    """What reads a tensor on disk, or a box of it."""

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill whole tensors of the same shapes, in place."""

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill a whole tensor with the box of its shape that begins at `offset`."""


class StoredTensors(PartReader, Protocol):
    """Tensors on disk by name, in one file or in several."""

    @property
    def path(self) -> Path:
        """The file, or the index of several."""

    @property
    def places(self) -> Mapping[str, Kept]:
        """What is known of each."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts beside them."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor on disk. Local."""

    source: PartReader
    name: str
    """Under which the source has it."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.shape.numel() * self.dtype.itemsize

    def element_size(self) -> int:
        """What one element takes, in bytes."""
        return self.dtype.itemsize

    def detach(self) -> StoredTensor:
        """Itself, as there is no record of how it was computed."""
        return self

    def read(self) -> Tensor:
        """All of it, on the CPU."""
        return self.source.read(self.name)

    def read_into(self, target: Tensor) -> None:
        """Fill a tensor of the same shape in place; of a sharded one this process's part, and no more is read."""
        fill(self.source, {self.name: target})


def fill(source: PartReader, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors of the same shapes in place; of sharded ones this process's part, and no more is read. Local."""
    source.read_into({name: target for name, target in targets.items() if not is_sharded(target)})
    with torch.no_grad():
        for name, target in targets.items():
            if is_sharded(target):
                for part in parts_of(target):
                    source.read_part(name, part.offset, part.values)


def read_all(value: Any) -> Any:
    """A state in which stored tensors were read, on the CPU; one that is there twice is one again. Local.

    Args:
        value: nested mappings, lists, tuples and deques, which are changed in place.
    """
    found: dict[int, StoredTensor] = {}
    _collect(value, found)
    read = {number: torch.empty(each.shape, dtype=each.dtype) for number, each in found.items()}
    by_source: dict[int, list[int]] = {}
    for number, each in found.items():
        by_source.setdefault(id(each.source), []).append(number)
    for numbers in by_source.values():
        found[numbers[0]].source.read_into({found[number].name: read[number] for number in numbers})
    return _replaced(value, read)


def _collect(value: Any, found: dict[int, StoredTensor]) -> None:
    if isinstance(value, StoredTensor):
        found[id(value)] = value
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, found)
    elif isinstance(value, (list, tuple, deque)):
        for each in value:
            _collect(each, found)


def _replaced(value: Any, read: Mapping[int, Tensor]) -> Any:
    if isinstance(value, StoredTensor):
        return read[id(value)]
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _replaced(each, read)
    elif isinstance(value, (list, deque)):
        for index, each in enumerate(value):
            value[index] = _replaced(each, read)
    elif type(value) is tuple:
        return tuple(_replaced(each, read) for each in value)
    return value
