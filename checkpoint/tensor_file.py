"""Tensors in one file of the safetensors layout: written one after another, read straight into where they belong.

The layout: eight bytes with the length of the header, the header as JSON (for each tensor its number format, its shape
and where its bytes begin and end; texts under `__metadata__`), and the bytes of all tensors without holes.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .boxes import index_of, read_shape
from .hashing import HashedFile
from .stored import StoredTensor

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
_LARGE_RUN_BYTES = 4096
_READERS = 4
_MOST_TARGETS = 512  # an operating system takes at least 1024 in one call, and some no more


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
    file: HashedFile | BinaryIO,
    tensors: Mapping[str, Tensor | StoredTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors into a new file. Local; takes the memory of one tensor more at most.

    Args:
        file: nothing is in it yet. In a hashed one, the tensors don't change before the end of its context.
        tensors: of formats that the layout knows, on any device, contiguous or not, or on disk; each is stored by
            itself.
        metadata: texts beside them.
    """
    file.write(_header(tensors, metadata or {}))
    for name in _ordered(tensors):
        given = tensors[name]
        values = given.read() if isinstance(given, StoredTensor) else given.detach()
        is_plain = values.device.type == "cpu" and values.is_contiguous() and not (values.is_conj() or values.is_neg())
        plain = values if is_plain else torch.empty(values.shape, dtype=values.dtype).copy_(values)
        file.write(_bytes_of(plain))
        if isinstance(file, HashedFile) and (isinstance(given, StoredTensor) or not is_plain):
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
                if _is_like_the_file(target, place):
                    pieces += _pieces(place.begin, _memory_of(target))
                else:
                    self._copy(file.fileno(), place, target.detach())
            self._read_pieces(file.fileno(), pieces)

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill a tensor, on any device and of any number format, with the box of its shape that begins at `offset`.

        Raises:
            CheckpointError: the file has become shorter.
        """
        if target.numel():
            with self.path.open("rb", buffering=0) as file:
                self._read_box(file.fileno(), self.places[name], tuple(offset), target.detach())

    def _read_box(self, descriptor: int, place: Place, offset: tuple[int, ...], target: Tensor) -> None:
        if not place.shape:
            self._copy(descriptor, place, target)
            return
        row = place.size_bytes // place.shape[0]
        begin = place.begin + offset[0] * row
        run = target.shape[1:]
        if run == place.shape[1:]:  # rows that lie behind each other
            rows = Place(place.dtype, target.shape, begin)
            if _is_like_the_file(target, place):
                self._read_pieces(descriptor, _pieces(begin, _memory_of(target)))
            else:
                self._copy(descriptor, rows, target)
        elif row > _PIECE_BYTES or run.numel() * place.dtype.itemsize >= _LARGE_RUN_BYTES:
            for index in range(target.shape[0]):
                self._read_box(
                    descriptor, Place(place.dtype, place.shape[1:], begin + index * row), offset[1:], target[index]
                )
        else:  # small pieces: whole rows, of which most is left out, take fewer calls
            step = _PIECE_BYTES // row
            cut = index_of(offset[1:], run)
            memory = torch.empty((min(step, target.shape[0]), *place.shape[1:]), dtype=place.dtype)
            for index in range(0, target.shape[0], step):
                part = target[index : index + step]
                piece = memory[: len(part)]
                self._read_piece(descriptor, (begin + index * row, _bytes_of(piece)))
                part.copy_(piece[(slice(None), *cut)])

    def _read_pieces(self, descriptor: int, pieces: list[tuple[int, memoryview]]) -> None:
        waiting = deque(_runs(pieces))

        def read() -> None:
            while waiting:
                try:
                    run = waiting.popleft()
                except IndexError:  # another thread has taken the last
                    return
                self._read_run(descriptor, *run)

        if len(waiting) <= 1:
            read()
            return
        with ThreadPoolExecutor(_READERS - 1, thread_name_prefix="loopwright-read") as pool:
            others = [pool.submit(read) for _ in range(_READERS - 1)]
            read()
            for each in others:
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
        self._read_run(descriptor, begin, [target] if target else [])

    def _read_run(self, descriptor: int, begin: int, targets: list[memoryview]) -> None:
        """Fill memories with what lies behind each other in the file."""
        while targets:
            count = os.preadv(descriptor, targets, begin)
            if count == 0:
                raise _damaged(self.path, "it ends early")
            begin += count
            while targets and count >= len(targets[0]):
                count -= len(targets.pop(0))
            if count:
                targets[0] = targets[0][count:]


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
    for begin, taken, name in sorted((place.begin, place.size_bytes, name) for name, place in places.items()):
        if begin != end:
            raise _damaged(path, f"the tensor {name!r} does not begin where the one before it ends")
        end += taken
    if end != size:
        raise _damaged(path, f"its header describes {end} bytes, and the file has {size}")
    return places, metadata


def _place(entry: Mapping[str, Any], data_begin: int) -> Place:
    begin, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    place = Place(dtype, read_shape(entry["shape"], dtype), data_begin + begin)
    if begin < 0 or end - begin != place.size_bytes:
        raise ValueError(f"{entry} contradicts itself")
    return place


def _ordered(tensors: Mapping[str, Tensor | StoredTensor]) -> list[str]:
    """The order in the file: large elements first, so that each tensor begins at a multiple of its element."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _header(tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, str]) -> bytes:
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


def _runs(pieces: list[tuple[int, memoryview]]) -> list[tuple[int, list[memoryview]]]:
    """The same with those together that lie behind each other in the file, as far as one call may read them."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = size = 0
    for begin, memory in sorted(pieces, key=lambda piece: piece[0]):
        if not runs or begin != end or size >= _PIECE_BYTES or len(runs[-1][1]) == _MOST_TARGETS:
            runs.append((begin, []))
            size = 0
        runs[-1][1].append(memory)
        size, end = size + len(memory), begin + len(memory)
    return runs


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _is_like_the_file(target: Tensor, place: Place) -> bool:
    """Whether a tensor's memory may be filled with the bytes of the file."""
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return is_plain and target.dtype == place.dtype and place.size_bytes > 0


def _memory_of(tensor: Tensor) -> memoryview:
    """As `_bytes_of`, of one that has elements and that somebody else keeps; made in a fifth of the time."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} can't be read as safetensors ({reason}). Expected a whole file written by Loopwright or by "
        "another safetensors writer; a pickle is never opened under this name."
    )
