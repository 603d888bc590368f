"""`CSVTracker`: one row per record, one column per metric."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..distributed.atomic import whole_file
from ..distributed.errors import TrackerError
from .files import Behind, RunRecord, cut_partial_line, flush_to_disk, say_removed
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened

NAMES = NameRule(reserved=frozenset({"step"}))
"""Metric names are kept; one called "step" gives way to the step."""


class CSVTracker(Tracker):
    """Appends each record as one row; the first column is `step`, a metric that a record lacks is an empty cell.

    A metric that appears for the first time adds a column at the right: the file is then written anew beside the old
    one and replaces it whole. NaN and the infinities are `nan`, `inf` and `-inf`. The configuration and the outcome
    stand in `metrics.run.json`. A run that is resumed in the same folder goes on in the same file, which becomes what
    it was at the step that it resumes from.

    Args:
        path: the file. The default is `metrics.csv` in the run's folder.
        name: the tracker's name, where a run has two of them.
    """

    def __init__(self, path: str | Path | None = None, *, name: str = "csv") -> None:
        self.path = None if path is None else Path(path)
        self.name = name
        self._table: _Table | None = None
        self._record: RunRecord | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the file for appending; a last row without its end, left by a killed process, is removed.

        Raises:
            TrackerError: the file is a table of something else.
        """
        path = self.path or run.directory / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = _Table(path)
        try:
            if run.resumed_step is not None:
                say_removed(self.name, table.remove_later(run), run.resumed_step, path)
            self._record = RunRecord(path, run, config)
        except BaseException:
            table.close()
            raise
        self._table = table

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one row.

        Raises:
            TrackerError: no run is open.
        """
        table = opened(self._table, self)
        table.append({"step": step, **{NAMES.apply(name): value for name, value in metrics.items()}})

    def flush(self) -> None:
        """Put every row on the disk."""
        if self._table is not None:
            self._table.flush()

    def finish(self, status: Status) -> None:
        """Close the file and write the outcome."""
        table, self._table = self._table, None
        record, self._record = self._record, None
        if table is not None:
            table.close()
        if record is not None:
            record.close(status)


class _Table:
    """A CSV file that is appended to and can grow columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        cut_partial_line(path)
        self._columns = next(self._rows(), [])
        if self._columns and self._columns[0] != "step":
            raise TrackerError(
                f"{path}: its first column is {self._columns[0]!r}, not 'step', so it is not a table of metrics. "
                "Name another file: CSVTracker(path=...)."
            )
        self._file: TextIO = path.open("a", encoding="utf-8", newline="")

    def append(self, row: Mapping[str, float]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._grow(new)
        _write(self._file, [[row.get(name, "") for name in self._columns]])
        self._file.flush()

    def remove_later(self, run: RunInfo) -> int:
        """Remove the rows that come again, and the columns that no other row has; returns the number of rows."""
        kept, num_later, is_behind = set[int](), 0, Behind(run)
        for row in self._data():
            if _comes_again(row, is_behind):
                num_later += 1
            else:
                kept.update(index for index, cell in enumerate(row) if cell)
        if num_later:
            columns = [name for index, name in enumerate(self._columns) if index in kept]
            is_behind = Behind(run)
            rows = (row for row in self._data() if not _comes_again(row, is_behind))
            self._replace(columns, ([cell for index, cell in enumerate(row) if index in kept] for row in rows))
        return num_later

    def flush(self) -> None:
        flush_to_disk(self._file)

    def close(self) -> None:
        self._file.close()

    def _grow(self, new: list[str]) -> None:
        columns = self._columns + new
        self._replace(columns, (row + [""] * (len(columns) - len(row)) for row in self._data()))

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        """Write the file anew. The old one stays whole until the new one replaces it."""
        with whole_file(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            _write(file, [columns] if columns else [])  # before the first record there is no header
            _write(file, rows)
        self._file.close()
        self._columns = columns
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _data(self) -> Iterator[list[str]]:
        rows = self._rows()
        next(rows, None)
        yield from rows

    def _rows(self) -> Iterator[list[str]]:
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                yield from csv.reader(file)


def _comes_again(row: Sequence[str], is_behind: Behind) -> bool:
    return bool(row) and row[0].lstrip("-").isdecimal() and is_behind(int(row[0]))


def _write(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    csv.writer(file, lineterminator="\n").writerows(rows)
