"""Tensors in one file of the safetensors layout: written one after another, read straight into where they belong.

The layout: eight bytes with the length of the header, the header as JSON (for each tensor its number format, its shape
and where its bytes begin and end; texts under `__metadata__`), and the bytes of all tensors without holes.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .hashing import HashedFile

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {word: getattr(torch, name) for name, word in _NAMES.items() if hasattr(torch, name)}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_PIECE_BYTES = 4 * 2**20
_READERS = 4


class Place(NamedTuple):
    """A tensor of a file: its number format, its shape, and where it begins in the file."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self.shape.numel() * self.dtype.itemsize


def knows_dtype(dtype: torch.dtype) -> bool:
    """Whether the layout has a word for a number format. Local."""
    return dtype in _WORDS


def write_tensors(
    file: HashedFile | BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into a new file. Local; takes the memory of one tensor more at most.

    Args:
        file: nothing is in it yet. In a hashed one, the tensors don't change before the end of its context.
        tensors: of formats that the layout knows, on any device, contiguous or not; each is stored by itself.
        metadata: texts beside them.
    """
    file.write(_header(tensors, metadata or {}))
    for name in _ordered(tensors):
        values = tensors[name].detach()
        is_copied = values.device.type != "cpu" or not values.is_contiguous() or values.is_conj() or values.is_neg()
        plain = torch.empty(values.shape, dtype=values.dtype).copy_(values) if is_copied else values
        file.write(_bytes_of(plain))
        if is_copied and isinstance(file, HashedFile):
            file.settle()  # there is one copy at a time


class TensorFile:
    """A file of tensors, to read. It is open during calls alone. Local.

    Raises:
        CheckpointError: it is no file of this layout, or not a whole one.
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb", buffering=0) as file:
            self.places, self.metadata = _read_header(path, file.fileno())

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        place = self.places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same shapes, on any devices and of any number formats, in place.

        Raises:
            CheckpointError: the file has become shorter.
        """
        pieces = []
        with self.path.open("rb", buffering=0) as file:
            for name, target in targets.items():
                place = self.places[name]
                if target.device.type == "cpu" and target.dtype == place.dtype and target.is_contiguous():
                    pieces += _pieces(place.begin, _bytes_of(target.detach()))
                else:
                    self._copy(file.fileno(), place, target.detach())
            self._read_pieces(file.fileno(), pieces)

    def _read_pieces(self, descriptor: int, pieces: list[tuple[int, memoryview]]) -> None:
        waiting = deque(pieces)

        def read() -> None:
            while waiting:
                try:
                    piece = waiting.popleft()
                except IndexError:  # another thread has taken the last
                    return
                self._read_piece(descriptor, piece)

        if sum(len(memory) for _, memory in pieces) <= _PIECE_BYTES:
            read()
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="loopwright-read") as pool:
            for each in [pool.submit(read) for _ in range(_READERS)]:
                each.result()

    def _copy(self, descriptor: int, place: Place, target: Tensor) -> None:
        """Through a small memory between: rows of the first dimension at a time, if there is one."""
        row = place.size_bytes // max(place.shape[0], 1) if place.shape else 0
        if place.size_bytes <= _PIECE_BYTES or not row:
            piece = torch.empty(place.shape, dtype=place.dtype)
            self._read_piece(descriptor, (place.begin, _bytes_of(piece)))
            target.copy_(piece)
        elif row > _PIECE_BYTES:
            for index in range(place.shape[0]):
                self._copy(descriptor, Place(place.dtype, place.shape[1:], place.begin + index * row), target[index])
        else:
            step = _PIECE_BYTES // row
            piece = torch.empty((step, *place.shape[1:]), dtype=place.dtype)
            for index in range(0, place.shape[0], step):
                part = target[index : index + step]
                self._read_piece(descriptor, (place.begin + index * row, _bytes_of(piece[: len(part)])))
                part.copy_(piece[: len(part)])

    def _read_piece(self, descriptor: int, piece: tuple[int, memoryview]) -> None:
        begin, target = piece
        while target:
            count = os.preadv(descriptor, [target], begin)
            if count == 0:
                raise _damaged(self.path, "it ends early")
            begin, target = begin + count, target[count:]


def _read_header(path: Path, descriptor: int) -> tuple[dict[str, Place], dict[str, str]]:
    size = os.fstat(descriptor).st_size
    first = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
    if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        raise _damaged(path, f"its header is said to have {length} bytes, and the file has {size}")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        places = {name: _place(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise _damaged(path, f"its header can't be read: {type(error).__name__}: {error}") from error
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].size_bytes)):
        if place.begin != end:
            raise _damaged(path, f"the tensor {name!r} does not begin where the one before it ends")
        end += place.size_bytes
    if end != size:
        raise _damaged(path, f"its header describes {end} bytes, and the file has {size}")
    return places, metadata


def _place(entry: Mapping[str, Any], data_begin: int) -> Place:
    begin, end = entry["data_offsets"]
    place = Place(_DTYPES[entry["dtype"]], torch.Size(entry["shape"]), data_begin + begin)
    if min(begin, *place.shape, 0) < 0 or end - begin != place.size_bytes:
        raise ValueError(f"{entry} contradicts itself")
    return place


def _ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """The order in the file: large elements first, so that each tensor begins at a multiple of its element."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in _ordered(tensors):
        tensor = tensors[name]
        end = begin + tensor.nbytes
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(begin: int, memory: memoryview) -> list[tuple[int, memoryview]]:
    """Where in the file to read, and where to, a part at a time."""
    return [(begin + offset, memory[offset : offset + _PIECE_BYTES]) for offset in range(0, len(memory), _PIECE_BYTES)]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} can't be read as safetensors ({reason}). Expected a whole file written by Loopwright or by "
        "another safetensors writer; a pickle is never opened under this name."
    )
