"""The tracker cases that one process can show, by their id; wandb's part of B67 and B70 is in test_wandb.py."""

from __future__ import annotations

import csv
import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from loopwright.distributed.errors import TrackerError
from loopwright.trackers.group import TrackerGroup
from loopwright.trackers.memory import MemoryTracker
from loopwright.trackers.names import original_name
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo

NAMES = ["recall@5", "cpu(%)", "acc[top1]", "beta=2", "val/a b", "größe", "a@b", "a_b"]

# MLflow's own use of SQLAlchemy is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def run(mlflow_project: Path, request: pytest.FixtureRequest) -> RunInfo:
    return RunInfo(request.node.name, "cases", mlflow_project / request.node.name)


def write(run: RunInfo, metrics: Mapping[str, Any], step: int) -> None:
    """One record, twice, to every tracker that keeps its data on this machine."""
    group = create_trackers(["mlflow", "jsonl", "csv", "tensorboard"])
    group.start(run, {})
    group.log(metrics, step)
    group.log(metrics, step + 1)
    group.finish("success")


def read_mlflow(run: RunInfo, step: int) -> dict[str, float]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.directory.parent / 'mlflow.db'}")
    run_id = run.run_ids["mlflow"]
    histories = [client.get_metric_history(run_id, name) for name in client.get_run(run_id).data.metrics]
    return {point.key: point.value for points in histories for point in points if point.step == step}


def read_jsonl(run: RunInfo, step: int) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"the bare word {word} is no JSON")

    rows = [
        json.loads(line, parse_constant=refuse) for line in (run.directory / "metrics.jsonl").read_text().splitlines()
    ]
    (row,) = (row for row in rows if row.pop("step") == step)
    return dict(row)


def read_csv(run: RunInfo, step: int) -> dict[str, float]:
    with (run.directory / "metrics.csv").open(newline="", encoding="utf-8") as file:
        (row,) = (row for row in csv.DictReader(file) if int(row.pop("step")) == step)
    return {name: float(value) for name, value in row.items() if value}


def read_tensorboard(run: RunInfo, step: int) -> dict[str, float]:
    events = EventAccumulator(str(run.directory))
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: event.value for tag, found in scalars.items() for event in found if event.step == step}


def test_b67_metric_names_that_one_tracker_rejects(run: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    values = {name: float(index) for index, name in enumerate(NAMES)}
    write(run, values, 3)
    assert not [record for record in caplog.records if record.name.startswith("loopwright")]
    for step in (3, 4):
        assert read_jsonl(run, step) == read_csv(run, step) == read_tensorboard(run, step) == values
        stored = read_mlflow(run, step)
        assert stored == {
            "recall-x40-5": 0.0,
            "cpu-x28--x25--x29-": 1.0,
            "acc-x5b-top1-x5d-": 2.0,
            "beta-x3d-2": 3.0,
            "val/a b": 4.0,
            "größe": 5.0,
            "a-x40-b": 6.0,
            "a_b": 7.0,
        }
        assert {original_name(name): value for name, value in stored.items()} == values


def test_b68_none_nan_tensor_and_text_values(run: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    record = {
        "a": None,
        "b": math.nan,
        "c": math.inf,
        "d": torch.tensor(1.5),
        "e": torch.tensor(2.5, requires_grad=True),
        "f": np.float32(0.5),
        "g": "text",
        "h": torch.ones(3),
    }
    write(run, record, 1)
    messages = [entry.getMessage() for entry in caplog.records if entry.name.startswith("loopwright")]
    assert [message.partition(", not one")[0] for message in messages] == [
        "metric 'g' holds a value of type str",
        "metric 'h' holds a value of type Tensor and shape (3,)",
    ]
    numbers = {"d": 1.5, "e": 2.5, "f": 0.5}
    for step in (1, 2):
        assert read_jsonl(run, step) == {"b": "NaN", "c": "Infinity", **numbers}
        for found, infinity in (
            (read_csv(run, step), math.inf),
            (read_tensorboard(run, step), math.inf),
            (read_mlflow(run, step), sys.float_info.max),  # its SQL store keeps no infinity
        ):
            assert math.isnan(found.pop("b"))
            assert found == {"c": infinity, **numbers}


class RejectsSmallerSteps(MemoryTracker):
    """As wandb was: what comes with a smaller step than the last is lost."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.runs[-1].records and step < self.runs[-1].records[-1][0]:
            raise TrackerError(f"step {step} is smaller than the last")
        super().log(metrics, step)


def test_b70_a_smaller_step_is_held_and_nothing_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = RejectsSmallerSteps()
    group = TrackerGroup([tracker])
    group.start(RunInfo("fit", "cases", tmp_path), {})
    group.log({"loss": 1.0}, 2)
    group.log({"loss": 2.0, "lr": 0.5}, 4)
    group.log({"val/loss": 3.0}, 1)  # a callback that counts validation's own batches
    group.log({"lr": 0.25}, 3)
    group.log({"loss": 4.0}, 6)
    group.finish("success")
    assert tracker.runs[0].records == [
        (2, {"loss": 1.0}),
        (4, {"loss": 2.0, "lr": 0.5}),
        (4, {"val/loss": 3.0}),
        (4, {"lr": 0.25}),
        (6, {"loss": 4.0}),
    ]

    # A later run of the same trackers begins where it says: validate() of a checkpoint at step 4.
    group.start(RunInfo("validate", "cases", tmp_path), {})
    group.log({"val/loss": 5.0}, 4)
    group.finish("success")
    assert tracker.runs[1].records == [(4, {"val/loss": 5.0})]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
