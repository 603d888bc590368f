from __future__ import annotations

import csv
import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.distributed.errors import TrackerError
from loopwright.trackers.csv import CSVTracker
from loopwright.trackers.names import original_name
from loopwright.trackers.tracker import RunInfo, Tracker

from .contract import Stored, TrackerContract


class TestContract(TrackerContract):
    def make(self) -> Tracker:
        return CSVTracker()

    def read(self, run: RunInfo) -> Stored:
        series: dict[str, list[tuple[int, float]]] = {}
        path = run.directory / "metrics.csv"
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name, value in row.items():
                    if value:
                        series.setdefault(original_name(name), []).append((step, float(value)))
        record = json.loads(path.with_name("metrics.run.json").read_text())
        return Stored(series=series, config=json.dumps(record["config"], ensure_ascii=False), status=record["status"])


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo("one", "digits", tmp_path / "one")


def log(run: RunInfo, *records: dict[str, float]) -> str:
    """Log each record at its index, and return the file."""
    tracker = CSVTracker()
    tracker.start(run, {})
    for step, record in enumerate(records):
        tracker.log(record, step)
    tracker.finish("success")
    return (run.directory / "metrics.csv").read_text()


def test_columns_grow_at_the_right(run: RunInfo) -> None:
    text = log(run, {"b": 0.5, "a": 1}, {"a": float("nan")}, {"c,d": float("-inf"), "b": 2.0}, {"a": 3.0})
    assert text == 'step,b,a,"c,d"\n0,0.5,1,\n1,,nan,\n2,2.0,,-inf\n3,,3.0,\n'


def test_appending_leaves_the_file_in_place_and_a_new_column_replaces_it_whole(run: RunInfo) -> None:
    path = run.directory / "metrics.csv"
    tracker = CSVTracker()
    tracker.start(run, {})
    tracker.log({"a": 1.0}, 0)
    with path.open() as before:
        tracker.log({"a": 2.0}, 1)
        tracker.log({"b": 3.0}, 2)
        # A reader that holds the old file sees the appended row, and not half of the new file.
        assert before.read() == "step,a\n0,1.0\n1,2.0\n"
    assert path.read_text() == "step,a,b\n0,1.0,\n1,2.0,\n2,,3.0\n"
    tracker.finish("success")
    assert sorted(path.name for path in run.directory.iterdir()) == ["metrics.csv", "metrics.run.json"]


def test_a_new_column_that_can_not_be_written_leaves_the_table_as_it_was(run: RunInfo) -> None:
    path = run.directory / "metrics.csv"
    tracker = CSVTracker()
    tracker.start(run, {})
    tracker.log({"a": 1.0}, 0)
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        tracker.log({"\ud800": 2.0}, 1)  # no text file can hold this name
    tracker.log({"a": 3.0}, 2)
    tracker.finish("success")
    assert path.read_text() == "step,a\n0,1.0\n2,3.0\n"
    assert sorted(path.name for path in run.directory.iterdir()) == ["metrics.csv", "metrics.run.json"]


def test_a_resumed_run_takes_up_the_columns(run: RunInfo) -> None:
    log(run, {"a": 1.0, "b": 2.0})
    assert log(run, {"b": 3.0}) == "step,a,b\n0,1.0,2.0\n0,,3.0\n"


def test_a_row_cut_by_a_kill_is_removed_on_resume(run: RunInfo) -> None:
    run.directory.mkdir()
    (run.directory / "metrics.csv").write_text("step,a\n1,0.5\n2,0.1")
    assert log(run, {"a": 2.0}) == "step,a\n1,0.5\n0,2.0\n"


def test_a_table_of_something_else_is_left_alone(run: RunInfo) -> None:
    run.directory.mkdir()
    path = run.directory / "metrics.csv"
    path.write_text("name,price\nx,1\n")
    with pytest.raises(TrackerError, match=r"metrics\.csv: its first column is 'name', not 'step'.*CSVTracker\(path="):
        CSVTracker().start(run, {})
    assert path.read_text() == "name,price\nx,1\n"


def test_a_start_that_fails_halfway_leaves_nothing_open(run: RunInfo) -> None:
    (run.directory / "metrics.run.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"metrics\.run\.json"):
        CSVTracker().start(run, {})
    gc.collect()  # a file that was left open would warn here, which is an error in tests


def test_path_is_where_it_writes(run: RunInfo, tmp_path: Path) -> None:
    tracker = CSVTracker(tmp_path / "logs" / "table.csv")
    tracker.start(run, {})
    tracker.log({"a": 1.0}, 1)
    tracker.finish("success")
    assert (tmp_path / "logs" / "table.csv").read_text() == "step,a\n1,1.0\n"
    assert not run.directory.exists()


def test_a_resumed_table_is_what_it_was_at_that_step(run: RunInfo) -> None:
    log(run, {"a": 1.0}, {"b,c": 2.0, "a": float("nan")}, {"d": 3.0, "a": 0.5})
    path = run.directory / "metrics.csv"
    for step, text in ((1, 'step,a,"b,c"\n0,1.0,\n1,nan,2.0\n'), (0, "step,a\n0,1.0\n"), (-1, "")):
        tracker = CSVTracker()
        tracker.start(replace(run, resumed_step=step), {})
        tracker.finish("success")
        assert path.read_text() == text


def test_rows_of_others_stay(run: RunInfo) -> None:
    run.directory.mkdir()
    path = run.directory / "metrics.csv"
    path.write_text("step,a\n1,0.5\nnote,x\n\n2,0.25,7\n3,0.5\n")
    tracker = CSVTracker()
    tracker.start(replace(run, resumed_step=2), {})
    tracker.finish("success")
    assert path.read_text() == "step,a\n1,0.5\nnote,x\n\n2,0.25,7\n"
