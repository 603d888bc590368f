"""`JSONLTracker`: one JSON object per record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..distributed.atomic import whole_file
from .files import Behind, RunRecord, cut_partial_line, flush_to_disk, say_removed, strict_json
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened

NAMES = NameRule(reserved=frozenset({"step"}))
"""Metric names are kept; one called "step" gives way to the step."""
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')  # how every line of ours begins


class JSONLTracker(Tracker):
    """Appends each record as one line, `{"step": 50, "train/loss": 0.25}`, which is in the file at once.

    Every line is strict JSON: NaN and the infinities are the texts "NaN", "Infinity" and "-Infinity", which Python's
    `float()` reads. The configuration and the outcome stand beside it in `metrics.run.json`. A run that is resumed in
    the same folder goes on in the same file; lines behind the step that it resumes from are removed.

    Args:
        path: the file. The default is `metrics.jsonl` in the run's folder.
        name: the tracker's name, where a run has two of them.
    """

    def __init__(self, path: str | Path | None = None, *, name: str = "jsonl") -> None:
        self.path = None if path is None else Path(path)
        self.name = name
        self._file: TextIO | None = None
        self._record: RunRecord | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the file for appending; a last line without its end, left by a killed process, is removed."""
        path = self.path or run.directory / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_partial_line(path)
        if run.resumed_step is not None and path.exists():
            say_removed(self.name, _remove_later_lines(path, run), run.resumed_step, path)
        self._record = RunRecord(path, run, config)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line.

        Raises:
            TrackerError: no run is open.
        """
        file = opened(self._file, self)
        file.write(strict_json({"step": step, **{NAMES.apply(name): value for name, value in metrics.items()}}) + "\n")
        file.flush()

    def flush(self) -> None:
        """Put every line on the disk."""
        if self._file is not None:
            flush_to_disk(self._file)

    def finish(self, status: Status) -> None:
        """Close the file and write the outcome."""
        file, self._file = self._file, None
        record, self._record = self._record, None
        if file is not None:
            file.close()
        if record is not None:
            record.close(status)


def _remove_later_lines(path: Path, run: RunInfo) -> int:
    """Write the file anew without the records that come again; returns their number. Lines of others stay."""

    def kept_lines(file: BinaryIO) -> Iterator[bytes]:
        is_behind = Behind(run)
        return (line for line in file if (found := _STEP.match(line)) is None or not is_behind(int(found[1])))

    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
        file.seek(0)
        num_later = num_lines - sum(1 for _ in kept_lines(file))
    if num_later:
        with whole_file(path) as temporary, path.open("rb") as file, temporary.open("wb") as kept:
            kept.writelines(kept_lines(file))
    return num_later
