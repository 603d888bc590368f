"""Runs that are killed between two checkpoints and resumed; wandb's and MLflow's are in their own files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from loopwright.trackers.tracker import RunInfo

from . import test_csv, test_jsonl, test_tensorboard
from .killed import ONE_VALUE_FOR_EACH_STEP, killed_leg, resumed_leg


def test_a_killed_run_has_one_value_for_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunInfo("one", "digits", tmp_path / "one")
    group = killed_leg(run, {"name": "jsonl"}, {"name": "csv"}, {"name": "tensorboard"})
    (events,) = run.directory.glob("events.*")
    for path, torn in (("metrics.jsonl", b'{"step": 11, "lo'), ("metrics.csv", b"11,0."), (events.name, b"\x20\0\0")):
        with (run.directory / path).open("ab") as file:
            file.write(torn)
    with caplog.at_level(logging.INFO, "loopwright.trackers"):
        leg = resumed_leg(run, group)
    for reader in (test_jsonl.TestContract(), test_csv.TestContract(), test_tensorboard.TestContract()):
        stored = reader.read(leg)
        assert (stored.series, stored.status) == (ONE_VALUE_FOR_EACH_STEP, "success")
        assert "0.25" in stored.config
    # TensorBoard's writer may have had the later rows still in memory.
    assert caplog.messages[:2] == [
        f"tracker {word!r} goes on behind step 6: 4 later rows of an earlier leg were removed from "
        f"{run.directory / 'metrics'}.{word}."
        for word in ("jsonl", "csv")
    ]
    assert sorted(path.name for path in run.directory.iterdir() if "events" not in path.name) == [
        "metrics.csv",
        "metrics.jsonl",
        "metrics.run.json",
    ]
