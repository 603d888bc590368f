"""TensorBoard's event files: taking out what a resumed run writes again."""

from __future__ import annotations

import importlib
import logging
import math
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


def remove_later_events(directory: Path, last_step: int, num_known: int | None = None) -> int:
    """Remove from our event files what was written behind a checkpoint; returns the number of values.

    What the hyperparameter plugin shows goes as well, since it takes the first configuration and outcome that it finds.

    Args:
        directory: where the files are.
        last_step: values of larger steps go.
        num_known: what `EventCount` said at the checkpoint: values after so many go as well, whatever their step.
    """
    num_removed, left = 0, math.inf if num_known is None else num_known
    for path in event_files(directory):
        try:
            removed, kept = _remove_from_file(path, last_step, left)
        except _decode_error():
            logger.warning("%s is damaged and was left as it is: rows behind step %d may be in it.", path, last_step)
        else:
            num_removed, left = num_removed + removed, left - kept
    return num_removed


def _remove_from_file(path: Path, last_step: int, limit: float) -> tuple[int, int]:
    num_removed = num_kept = 0
    with whole_file(path) as temporary, path.open("rb") as file, temporary.open("wb") as new:
        for record, content in _records(file):
            event = _event_type().FromString(content)
            num_values = len(event.summary.value)
            if event.step > last_step or (num_values and num_kept >= limit and not _is_of_session(event)):
                num_removed += num_values
            elif not _is_of_session(event):
                num_kept += num_values
                new.write(record)
    return num_removed, num_kept


class EventCount:
    """How many values our event files of a folder have, in the order in which TensorBoard reads them.

    What the hyperparameter plugin shows is not counted. Each call reads what was written since the last one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ends: dict[Path, int] = {}
        self._count = 0

    def read(self) -> int:
        """The number of values that are in the files now. Those of a damaged file count up to the damage."""
        for path in event_files(self._directory):
            end = self._ends.get(path, 0)
            with path.open("rb") as file:
                for record, content in _records(file, end):
                    try:
                        event = _event_type().FromString(content)
                    except _decode_error():
                        break
                    end += len(record)
                    self._count += 0 if _is_of_session(event) else len(event.summary.value)
            self._ends[path] = end
        return self._count


def _is_of_session(event: Any) -> bool:
    return any(value.metadata.plugin_data.plugin_name == "hparams" for value in event.summary.value)


def _event_type() -> Any:
    return importlib.import_module("tensorboard.compat.proto.event_pb2").Event


def _decode_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
    return error


def _records(file: BinaryIO, begin: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """Each whole record of a file from a byte on, and its content; a last one that a kill cut short is left out."""
    file.seek(begin)
    left = os.fstat(file.fileno()).st_size - begin
    while left > _LENGTH.size + _CHECKSUM_SIZE:
        head = file.read(_LENGTH.size + _CHECKSUM_SIZE)
        (length,) = _LENGTH.unpack_from(head)
        left -= len(head) + length + _CHECKSUM_SIZE
        if left >= 0:
            body = file.read(length + _CHECKSUM_SIZE)
            yield head + body, body[:length]
