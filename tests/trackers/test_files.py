from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.trackers.files import cut_partial_line, strict_json, write_whole


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


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        write_whole(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
