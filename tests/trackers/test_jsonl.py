from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopwright.trackers.jsonl import JSONLTracker
from loopwright.trackers.names import original_name
from loopwright.trackers.tracker import RunInfo, Tracker

from .contract import Stored, TrackerContract


def refuse_constant(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def strict(text: str) -> Any:
    """Parse as a strict parser does: Python's own takes the bare words NaN and Infinity."""
    return json.loads(text, parse_constant=refuse_constant)


class TestContract(TrackerContract):
    def make(self) -> Tracker:
        return JSONLTracker()

    def read(self, run: RunInfo) -> Stored:
        series: dict[str, list[tuple[int, float]]] = {}
        for line in (run.directory / "metrics.jsonl").read_text().splitlines():
            row = strict(line)
            step = row.pop("step")
            for name, value in row.items():
                series.setdefault(original_name(name), []).append((step, float(value)))
        record = strict((run.directory / "metrics.run.json").read_text())
        return Stored(series=series, config=json.dumps(record["config"], ensure_ascii=False), status=record["status"])


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo("one", "digits", tmp_path / "runs" / "one")


def test_lines_and_record_are_exactly_these(run: RunInfo) -> None:
    tracker = JSONLTracker()
    tracker.start(run, {"lr": 0.5, "bound": float("inf"), "items": [float("nan")]})
    tracker.log({"loss": 0.25, "n": 16777217, "bad": float("nan"), "up": float("inf"), "down": float("-inf")}, 5)
    tracker.log({"step": 1.0, "größe": 2.0}, 6)
    record = run.directory / "metrics.run.json"
    assert strict(record.read_text())["status"] == "running"
    tracker.finish("failed")
    assert (run.directory / "metrics.jsonl").read_text() == (
        '{"step": 5, "loss": 0.25, "n": 16777217, "bad": "NaN", "up": "Infinity", "down": "-Infinity"}\n'
        '{"step": 6, "-x73-tep": 1.0, "gr\\u00f6\\u00dfe": 2.0}\n'
    )
    assert strict(record.read_text()) == {
        "name": "one",
        "project": "digits",
        "status": "failed",
        "config": {"lr": 0.5, "bound": "Infinity", "items": ["NaN"]},
    }


def test_a_record_is_in_the_file_at_once(run: RunInfo) -> None:
    tracker = JSONLTracker()
    tracker.start(run, {})
    tracker.log({"loss": 1.0}, 1)
    assert (run.directory / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    tracker.finish("success")


def test_a_line_cut_by_a_kill_is_removed_on_resume(run: RunInfo) -> None:
    path = run.directory / "metrics.jsonl"
    run.directory.mkdir(parents=True)
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    tracker = JSONLTracker()
    tracker.start(run, {})
    tracker.log({"loss": 3.0}, 2)
    tracker.finish("success")
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 3.0}\n'


def test_path_is_where_it_writes(run: RunInfo, tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "logs" / "a.jsonl")
    tracker.start(run, {})
    tracker.finish("success")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["a.jsonl", "a.run.json"]
    assert not run.directory.exists()


def test_lines_behind_the_step_are_removed_and_those_of_others_stay(run: RunInfo) -> None:
    path = run.directory / "metrics.jsonl"
    run.directory.mkdir(parents=True)
    kept = '{"step": 1, "loss": 1.0}\n\n{"note": "step 9"}\n{"step": 2}\n'
    path.write_text(kept + '{"step": 3, "loss": 1.0}\n{"step": 10}\n{"step": 4, "lo')
    tracker = JSONLTracker()
    tracker.start(replace(run, resumed_step=2), {})
    tracker.finish("success")
    assert path.read_text() == kept
    assert sorted(path.name for path in run.directory.iterdir()) == ["metrics.jsonl", "metrics.run.json"]


def test_a_file_without_later_lines_is_not_written_anew(run: RunInfo) -> None:
    tracker = JSONLTracker()
    tracker.start(run, {})
    tracker.log({"loss": 1.0}, 1)
    tracker.finish("failed")
    path = run.directory / "metrics.jsonl"
    with path.open() as reader:
        tracker.start(replace(run, resumed_step=1), {})
        tracker.log({"loss": 2.0}, 2)
        tracker.finish("success")
        assert reader.read() == path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
