from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.trackers.names import original_name
from loopwright.trackers.tracker import RunInfo, Tracker
from loopwright.trackers.wandb import WandbTracker
from loopwright.trackers.wandb_files import offline_files

from .conftest import hide_wandb_settings
from .contract import CONFIG, Stored, TrackerContract
from .killed import ONE_VALUE_FOR_EACH_STEP, killed_leg, resumed_leg
from .wandb_log import history, read_records

STATUS = {0: "success", 1: "failed", 255: "interrupted"}
OWN_COLUMNS = {"_step", "_runtime", "_timestamp"}


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """wandb without a trace of the machine at hand, and without its service afterwards."""
    hide_wandb_settings(monkeypatch)
    module = pytest.importorskip("wandb")
    yield module
    module.teardown()


def records_of(run: RunInfo) -> list[Any]:
    """Of all legs of a run, in the order in which they were written."""
    # wandb's service writes the last block of an offline run's file after `finish` has returned.
    pytest.importorskip("wandb").teardown()
    paths = run.directory.glob(f"wandb/offline-run-*/run-{run.run_ids['wandb']}.wandb")
    return [record for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns) for record in read_records(path)]


@pytest.mark.slow
class TestContract(TrackerContract):
    def make(self) -> Tracker:
        return WandbTracker(mode="offline")

    def read(self, run: RunInfo) -> Stored:
        records, series = records_of(run), dict[str, list[tuple[int, float]]]()
        for row in history(records):
            step = row.pop("step")
            for name in row.keys() - OWN_COLUMNS:
                series.setdefault(original_name(name), []).append((step, float(row[name])))
        exits = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
        return Stored(
            series=series, config=json.dumps(config_of(records), ensure_ascii=False), status=STATUS[exits[-1]]
        )


def config_of(records: list[Any]) -> dict[str, Any]:
    (*_, newest) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    return {item.key: json.loads(item.value_json) for item in newest.config.update if item.key != "_wandb"}


def test_offline_run_is_read_back(tmp_path: Path) -> None:
    run = RunInfo("one", "digits", tmp_path / "one")
    tracker = WandbTracker(mode="offline", tags=["a", "b"], group="g", notes="why")
    tracker.start(run, CONFIG)
    assert tracker.run.id == run.run_ids["wandb"]
    tracker.log({"loss": 0.5, "recall@5": float("nan"), "step": 9.0}, 4)
    tracker.log({"lr": 0.25}, 4)
    tracker.log({"loss": float("inf"), "": 1.0}, 2)  # a smaller step, which wandb's own step argument would drop
    tracker.log({"a": 1.0}, 5, commit=False)
    tracker.log_table("guesses", columns=["digit", "guess"], data=[[1, "one"], [2, "two"]], step=5)
    tracker.log({"b": 2.0})  # as a script does that was written for Accelerate
    tracker.finish("failed")

    records = records_of(run)
    rows = [{name: row[name] for name in row.keys() - OWN_COLUMNS} for row in history(records)]
    assert str(rows[0].pop("recall@5")) == "nan"
    assert "guesses" in rows[3]
    del rows[3]["guesses"]  # of what is nested, the reader knows the name alone
    assert rows == [
        {"step": 4, "loss": 0.5, "-x73-tep": 9.0},
        {"step": 4, "lr": 0.25},
        {"step": 2, "loss": float("inf"), "-x-": 1.0},
        {"step": 5, "a": 1.0},
        {"step": 5, "b": 2.0},
    ]
    (file,) = run.directory.rglob("media/table/*.json")
    assert json.loads(file.read_text())["data"] == [[1, "one"], [2, "two"]]
    assert config_of(records) == CONFIG
    (start, *_) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (start.display_name, start.project, start.run_group, list(start.tags)) == ("one", "digits", "g", ["a", "b"])
    assert start.notes == "why"
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
    axes = {metric.glob_name: metric.step_metric for record in records if (metric := record.metric).step_metric}
    assert axes == {"*": "step"}


@pytest.mark.slow
def test_an_active_run_is_joined_and_left_open(tmp_path: Path, wandb: Any) -> None:
    theirs = wandb.init(mode="offline", dir=str(tmp_path), project="theirs", config={"lr": 1.0})
    run = RunInfo("one", "digits", tmp_path / "one")
    tracker = WandbTracker()
    tracker.start(run, {"lr": 0.5, "width": 64})
    assert tracker.tracker is theirs
    tracker.log({"loss": 0.5}, 3)
    tracker.log_images({"digits": [torch.zeros(4, 4, 1).numpy()]}, 4)
    tracker.finish("success")
    assert wandb.run is theirs
    assert run.run_ids == {"wandb": theirs.id}
    assert dict(theirs.config) == {"lr": 0.5, "width": 64}
    theirs.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wandb.teardown()
    row, pictures = history(list(read_records(path)))
    assert (row["loss"], row["step"]) == (0.5, 3)
    assert ("digits" in pictures, pictures["step"]) == (True, 4)
    assert len(list(tmp_path.rglob("media/images/*.png"))) == 1


@pytest.mark.slow
def test_a_killed_run_has_one_value_for_each_step(tmp_path: Path) -> None:
    run = RunInfo("one", "digits", tmp_path / "one")
    group = killed_leg(run, {"name": "wandb", "mode": "offline"})
    leg = resumed_leg(run, group)
    stored = TestContract().read(leg)
    assert (stored.series, stored.status) == (ONE_VALUE_FOR_EACH_STEP, "success")
    assert json.loads(stored.config)["lr"] == 0.25
    # The rows of both legs have one numbering, which a server would order them by.
    assert [row["_step"] for row in history(records_of(leg))] == list(range(12))


@pytest.mark.slow
def test_rows_that_were_synced_already_stay_there_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunInfo("one", "digits", tmp_path / "one")
    contract = TestContract()
    contract.record(run, ({"loss": 1.0}, 5), ({"loss": 2.0}, 6))
    (path,) = offline_files(run.directory, run.run_ids["wandb"])
    path.with_suffix(".wandb.synced").touch()
    assert contract.resume(run, 5, ({"loss": 3.0}, 6)).series == {"loss": [(5, 1.0), (6, 3.0)]}
    assert (
        f"tracker 'wandb': the run goes on, but {path} was synced before: what an earlier leg wrote behind step 5 "
        "stays there beside the new rows."
    ) in caplog.messages
