from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwright.trackers.files import RunRecord, cut_partial_line, strict_json
from loopwright.trackers.tracker import RunInfo


def test_strict_json_names_what_json_lacks() -> None:
    nan, inf = float("nan"), float("inf")
    assert strict_json({"a": [nan, {"b": inf}], "c": -inf, "d": "é"}) == (
        '{"a": ["NaN", {"b": "Infinity"}], "c": "-Infinity", "d": "\\u00e9"}'
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("a\n", "a\n"),
        ("a\nb", "a\n"),
        ("a", ""),
        ("a\n\n", "a\n\n"),
        ("a\n" + "b" * 10_000, "a\n"),
        ("b" * 10_000, ""),
        ("b" * 4095 + "\n" + "c" * 4096, "b" * 4095 + "\n"),
    ],
    ids=range(8),
)
def test_a_partial_line_is_cut(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "file"
    path.write_text(before)
    cut_partial_line(path)
    assert path.read_text() == after


def test_no_file_has_no_partial_line(tmp_path: Path) -> None:
    cut_partial_line(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_run_is_replaced_whole(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "metrics.csv", RunInfo("one", "digits", tmp_path), {"lr": float("nan")})
    with record.path.open() as reader:
        record.close("success")
        before = json.load(reader)
    assert before == {"name": "one", "project": "digits", "status": "running", "config": {"lr": "NaN"}}
    assert json.loads(record.path.read_text()) == {**before, "status": "success"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.run.json"]
