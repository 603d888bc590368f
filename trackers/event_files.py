"""TensorBoard's event files: taking out what a resumed run writes again."""

from __future__ import annotations

import importlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..distributed.atomic import whole_file

logger = logging.getLogger(__name__)

SUFFIX = ".loopwright"
"""How the names of our event files end, so that those of other writers in the same folder are left alone."""

_TIME = 3  # where the time stands in a file's name
# Before the content of a record: its length and a checksum of that; behind it: a checksum of the content.
_LENGTH = struct.Struct("<Q")
_CHECKSUM_SIZE = 4


def event_files(directory: Path) -> list[Path]:
    """The event files of ours in a folder, in the order in which TensorBoard reads them."""
    return sorted(directory.glob(f"events.out.tfevents.*{SUFFIX}"))


def put_before_new_ones(directory: Path) -> None:
    """Rename our event files if need be, so that TensorBoard reads one that is opened now after all of them.

    It reads them in the order of their names, which begin with the time; within a second, or after the clock was set
    back, that is not the order in which they were written.
    """
    paths = event_files(directory)
    names = [path.name.split(".") for path in paths]  # events.out.tfevents.TIME.HOST.PROCESS.NUMBER
    if any(int(name[_TIME]) >= int(time.time()) for name in names):
        for index, (path, name) in enumerate(zip(paths, names, strict=True)):
            name[_TIME] = f"{index:010d}"
            path.rename(path.with_name(".".join(name)))


def remove_later_events(directory: Path, last_step: int) -> int:
    """Remove from our event files what was written at larger steps; returns the number of values.

    What the hyperparameter plugin shows goes as well, since it takes the first configuration and outcome that it finds.
    """
    event_type = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    error_type = importlib.import_module("google.protobuf.message").DecodeError
    num_removed = 0
    for path in event_files(directory):
        try:
            num_removed += _remove_from_file(path, last_step, event_type)
        except error_type:
            logger.warning("%s is damaged and was left as it is: rows behind step %d may be in it.", path, last_step)
    return num_removed


def _remove_from_file(path: Path, last_step: int, event_type: Any) -> int:
    num_removed = 0
    with whole_file(path) as temporary, path.open("rb") as file, temporary.open("wb") as kept:
        for record, content in _records(file):
            event = event_type.FromString(content)
            if event.step > last_step:
                num_removed += len(event.summary.value)
            elif not any(value.metadata.plugin_data.plugin_name == "hparams" for value in event.summary.value):
                kept.write(record)
    return num_removed


def _records(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Each whole record of a file, and its content; a last one that a kill cut short is left out."""
    left = os.fstat(file.fileno()).st_size
    while left > _LENGTH.size + _CHECKSUM_SIZE:
        head = file.read(_LENGTH.size + _CHECKSUM_SIZE)
        (length,) = _LENGTH.unpack_from(head)
        left -= len(head) + length + _CHECKSUM_SIZE
        if left >= 0:
            body = file.read(length + _CHECKSUM_SIZE)
            yield head + body, body[:length]
