"""Reads the file that wandb writes offline: a log of records in blocks, as LevelDB's."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

_HEADER_SIZE = 7
_BLOCK_SIZE = 32768
_FULL, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """Every record of a `.wandb` file.

    After the file's header come blocks of 32 KiB. A record is cut into pieces that fit: each has a checksum, a length
    and a kind (whole, first, middle, last). Fewer than 7 bytes at a block's end are unused.
    """
    data, position, pieces = path.read_bytes(), _HEADER_SIZE, list[bytes]()
    while position + _HEADER_SIZE <= len(data):
        left = _BLOCK_SIZE - position % _BLOCK_SIZE
        if left < _HEADER_SIZE:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER_SIZE
        pieces.append(data[position : position + length])
        position += length
        if kind in (_FULL, _LAST):
            yield Record.FromString(b"".join(pieces))
            pieces.clear()


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The logged rows: metric name to value, wandb's own columns with them."""
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in items]
