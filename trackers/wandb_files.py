"""The files that wandb writes offline: taking out the rows that a resumed run writes again.

After a header of 7 bytes such a file is a log of records in blocks of 32 KiB. A record is cut into pieces that fit into
what is left of a block; before each stand its checksum, its length, and whether it is a whole record or the first, a
middle or the last piece of one. What is left of a block stays empty where no piece fits.
"""

from __future__ import annotations

import importlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..distributed.atomic import whole_file

_FILE_HEADER_SIZE = 7
_BLOCK_SIZE = 32768
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def offline_files(directory: Path, run_id: str) -> list[Path]:
    """What wandb has written offline of one run below a folder, one file for each leg."""
    return sorted(directory.glob(f"*wandb/offline-run-*/run-{run_id}.wandb"))


def remove_later_rows(path: Path, last_step: int, step_name: str, num_known: int | None = None) -> int:
    """Remove the rows of a file that were written behind a checkpoint; returns their number.

    A last record that a kill has cut short goes as well.

    Args:
        path: the file.
        last_step: rows whose metric `step_name` is larger go.
        step_name: the name of that metric.
        num_known: rows that wandb has numbered this or higher go as well, whatever their step; it counts from 0.
    """
    record_type, num_later = _record_type(), 0
    with whole_file(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
        new.write(old.read(_FILE_HEADER_SIZE))
        for record in read_records(path):
            parsed = record_type.FromString(record)
            step, row = _value(parsed, step_name), _value(parsed, "_step")
            is_later = step is not None and step > last_step
            if is_later or (num_known is not None and row is not None and row >= num_known):
                num_later += 1
            else:
                _write_record(new, record)
    return num_later


def next_row(path: Path, begin: int = 0) -> int:
    """The number that wandb gives to the row after the last one of a file; 0 where it has none.

    Args:
        path: the file.
        begin: read from the block on in which this byte is.
    """
    record_type = _record_type()
    rows = (_value(record_type.FromString(record), "_step") for record in read_records(path, begin))
    return max((row + 1 for row in rows if row is not None), default=0)


def read_records(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Each whole record of a file that begins in the block of the byte `begin` or later, up to where it is cut."""
    with path.open("rb") as file:
        file.seek(max(begin // _BLOCK_SIZE * _BLOCK_SIZE, _FILE_HEADER_SIZE))
        pieces: list[bytes] | None = None
        for kind, piece in _pieces(file):
            if kind in (_WHOLE, _FIRST):
                pieces = []
            if pieces is not None:
                pieces.append(piece)
                if kind in (_WHOLE, _LAST):
                    yield b"".join(pieces)
                    pieces = None


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while True:
        left = _BLOCK_SIZE - file.tell() % _BLOCK_SIZE
        if left < _PIECE.size:
            file.seek(left, 1)
        head = file.read(_PIECE.size)
        if len(head) < _PIECE.size:
            return
        checksum, length, kind = _PIECE.unpack(head)
        piece = file.read(length)
        if _checksum(kind, piece) != checksum:
            return
        yield kind, piece


def _write_record(file: BinaryIO, record: bytes) -> None:
    position, is_first = 0, True
    while is_first or position < len(record):
        left = _BLOCK_SIZE - file.tell() % _BLOCK_SIZE
        if left < _PIECE.size:
            file.write(bytes(left))
            left = _BLOCK_SIZE
        piece = record[position : position + left - _PIECE.size]
        position += len(piece)
        is_last = position == len(record)
        kind = (_WHOLE if is_last else _FIRST) if is_first else (_LAST if is_last else _MIDDLE)
        file.write(_PIECE.pack(_checksum(kind, piece), len(piece), kind) + piece)
        is_first = False


def _checksum(kind: int, piece: bytes) -> int:
    return zlib.crc32(piece, zlib.crc32(bytes([kind])))


def _value(record: Any, name: str) -> int | None:
    """What a row of metrics has under a name; None where it has nothing, and of other records."""
    if record.WhichOneof("record_type") == "history":
        for item in record.history.item:
            if name in (item.key, *item.nested_key[:1]):
                return int(json.loads(item.value_json))
    return None


def _record_type() -> Any:
    return importlib.import_module("wandb.proto.wandb_internal_pb2").Record
