from __future__ import annotations

import gc
import json
import logging
import math
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.trackers.mlflow import MLflowTracker
from loopwright.trackers.names import original_name
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo, Tracker

from .contract import Stored, TrackerContract
from .killed import ONE_VALUE_FOR_EACH_STEP, killed_leg, resumed_leg

STATUS = {"FINISHED": "success", "FAILED": "failed", "KILLED": "interrupted"}

# MLflow's own use of SQLAlchemy is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def client(run: RunInfo) -> Any:
    mlflow = pytest.importorskip("mlflow")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.directory.parent / 'mlflow.db'}")


class TestContract(TrackerContract):
    infinity = sys.float_info.max

    @pytest.fixture
    def project(self, mlflow_project: Path) -> Path:
        return mlflow_project

    def make(self) -> Tracker:
        return MLflowTracker()

    def read(self, run: RunInfo) -> Stored:
        store, run_id = client(run), run.run_ids["mlflow"]
        stored = store.get_run(run_id)
        histories = {name: store.get_metric_history(run_id, name) for name in stored.data.metrics}
        series = {name: [(point.step, point.value) for point in points] for name, points in histories.items()}
        return Stored(
            series={original_name(name): points for name, points in series.items()},
            config=str(stored.data.params),
            status=STATUS[stored.info.status],
        )


@pytest.fixture
def run(mlflow_project: Path, request: pytest.FixtureRequest) -> RunInfo:
    return RunInfo(request.node.name, "digits", mlflow_project / request.node.name)


def test_run_has_its_name_experiment_tags_and_parameters(run: RunInfo) -> None:
    tracker = MLflowTracker(tags={"team@site": "vision"})
    tracker.start(run, {"model": {"width": 64}, "lr": 0.5, "none": None, "a@b": 1, "text": "x" * 7000})
    mlflow = sys.modules["mlflow"]
    assert mlflow.active_run() is None
    assert client(run).get_run(run.run_ids["mlflow"]).info.status == "RUNNING"
    tracker.finish("success")
    store = client(run)
    stored = store.get_run(run.run_ids["mlflow"])
    assert stored.info.run_name == run.name
    assert store.get_experiment(stored.info.experiment_id).name == "digits"
    assert stored.data.tags["team-x40-site"] == "vision"
    params = stored.data.params
    assert params.pop("text") == "x" * 5997 + "..."
    assert params == {"model.width": "64", "lr": "0.5", "none": "None", "a-x40-b": "1"}


def test_pictures_tables_and_files_are_artifacts(run: RunInfo, tmp_path: Path) -> None:
    pandas, figures = pytest.importorskip("pandas"), pytest.importorskip("matplotlib.figure")
    tracker = MLflowTracker()
    with pytest.raises(TrackerError, match=r"MLflowTracker\.log was called while no run is open"):
        tracker.log_images({"digits": []})
    tracker.start(run, {})
    tracker.log({"loss": 0.5}, timestamp=77, synchronous=True)
    picture = torch.zeros(4, 4, 3, dtype=torch.uint8)
    tracker.log_images({"digits@1": [picture, picture.numpy()]}, step=3)
    tracker.log_table("guesses", columns=["digit", "guess"], data=[[1, "one"], [2, "two"]], step=3)
    tracker.log_table("guesses", dataframe=pandas.DataFrame({"digit": [3], "guess": ["three"]}), step=4)
    with pytest.raises(ConfigError, match=r"log_table\('empty'\) of MLflowTracker got columns=\['a'\], data=None"):
        tracker.log_table("empty", columns=["a"])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    tracker.log_artifact(str(tmp_path / "notes" / "a.txt"))
    tracker.log_artifacts(str(tmp_path / "notes"), "folder")
    tracker.log_figure(figures.Figure(), "figures/a.png")
    tracker.finish("success")

    store, run_id = client(run), run.run_ids["mlflow"]
    (point,) = store.get_metric_history(run_id, "loss")
    assert (point.step, point.value, point.timestamp) == (0, 0.5, 77)
    names = {
        folder: [item.path for item in store.list_artifacts(run_id, folder)]
        for folder in ("images", "folder", "figures")
    }
    assert sum(bool(re.search(r"digits-x40-1.*step.3.*\.png$", name)) for name in names["images"]) == 2
    assert (names["folder"], names["figures"]) == (["folder/a.txt"], ["figures/a.png"])
    assert "a.txt" in [item.path for item in store.list_artifacts(run_id)]
    (file,) = (run.directory.parent / "mlartifacts").rglob(f"{run_id}/artifacts/guesses.json")
    table = json.loads(file.read_text())
    gc.collect()  # ends the threads with which MLflow read the table that it added to
    assert table == {"columns": ["step", "digit", "guess"], "data": [[3, 1, "one"], [3, 2, "two"], [4, 3, "three"]]}


def test_more_parameters_than_fit_into_one_request(run: RunInfo) -> None:
    tracker = MLflowTracker()
    tracker.start(run, {f"p{index}": index for index in range(250)})
    tracker.finish("success")
    found = client(run).get_run(run.run_ids["mlflow"]).data.params
    assert found == {f"p{index}": str(index) for index in range(250)}


def test_resume_adds_new_parameters_and_keeps_the_old(run: RunInfo) -> None:
    for config in ({"lr": 0.5}, {"lr": 0.25, "width": 64}):
        tracker = MLflowTracker()
        tracker.start(run, config)
        tracker.finish("success")
    assert client(run).get_run(run.run_ids["mlflow"]).data.params == {"lr": "0.5", "width": "64"}


def test_an_id_that_the_store_does_not_know_is_reported(run: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    run.run_ids["mlflow"] = "0" * 32
    group = create_trackers("mlflow")
    group.start(run, {})
    group.log({"loss": 1.0}, 1)
    group.finish("success")
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("loopwright"))
    assert (
        f"tracker 'mlflow' failed in MLflowTracker.start (MlflowException: Run with id={'0' * 32} not found" in message
    )


def test_experiment_and_uri_of_the_caller(run: RunInfo, mlflow_project: Path) -> None:
    tracker = MLflowTracker(f"sqlite:///{mlflow_project / 'mlflow.db'}", experiment="mine")
    tracker.start(RunInfo("r", "digits", Path("elsewhere") / "r", run.run_ids), {})
    tracker.finish("success")
    store = client(run)
    stored = store.get_run(run.run_ids["mlflow"])
    assert store.get_experiment(stored.info.experiment_id).name == "mine"
    assert not Path("elsewhere").exists()


def test_uri_that_mlflow_was_told(run: RunInfo, mlflow_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{mlflow_project / 'mlflow.db'}")
    tracker = MLflowTracker()
    tracker.start(RunInfo("r", "digits", Path("elsewhere") / "r", run.run_ids), {})
    tracker.log({"loss": math.pi}, 1)
    tracker.finish("success")
    assert client(run).get_run(run.run_ids["mlflow"]).data.metrics == {"loss": math.pi}
    assert not Path("elsewhere").exists()


@pytest.mark.usefixtures("mlflow_environment")
@pytest.mark.parametrize("is_unwritable", ["database", "folder"])
def test_a_database_that_can_not_be_written_is_reported_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_unwritable: str
) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path if is_unwritable == "database" else Path("/proc")  # where root can't write either
    if is_unwritable == "database":
        (folder / "mlflow.db").mkdir()
    elif not folder.is_dir():
        pytest.skip("needs /proc, a folder that nobody can write to")
    began = time.monotonic()
    group = create_trackers("mlflow")
    group.start(RunInfo("one", "digits", folder / "one"), {})
    group.log({"loss": 1.0}, 1)
    group.finish("success")
    assert time.monotonic() - began < 10  # MLflow would try for minutes
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("loopwright"))
    assert "tracker 'mlflow' failed in MLflowTracker.start (" in message
    assert f"{folder / 'mlflow.db'}" in message
    assert "Training goes on; nothing of this run is written there." in message


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_environment")
def test_folder_with_signs_that_mean_something_in_a_url(tmp_path: Path) -> None:
    run = RunInfo("one", "digits", tmp_path / "größe %41?#" / "one")
    tracker = MLflowTracker()
    tracker.start(run, {})
    tracker.finish("success")
    assert (run.directory.parent / "mlflow.db").stat().st_size > 0


def test_runs_that_start_together_share_a_new_experiment(mlflow_project: Path) -> None:
    runs = [RunInfo(f"together-{index}", "new", mlflow_project / f"together-{index}") for index in range(4)]
    barrier = threading.Barrier(len(runs))

    def record(run: RunInfo) -> None:
        tracker = MLflowTracker()
        barrier.wait(timeout=60)
        tracker.start(run, {"name": run.name})
        tracker.finish("success")

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(record, runs))
    experiments = {client(run).get_run(run.run_ids["mlflow"]).info.experiment_id for run in runs}
    assert len(experiments) == 1


def test_a_run_with_later_rows_goes_on_in_a_copy(run: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loopwright.trackers")
    tracker = MLflowTracker(tags={"team@site": "vision"})
    tracker.start(run, {"lr": 0.5, "a@b": 1})
    for step in range(1, 4):
        tracker.log({"loss": float(step), "a@b": 0.5}, step)
    first = run.run_ids["mlflow"]  # and then it was killed
    tracker = MLflowTracker(tags={"team@site": "other"})
    leg = replace(run, resumed_step=2)
    tracker.start(leg, {"lr": 0.25, "width": 64})
    tracker.log({"loss": 30.0}, 3)
    tracker.finish("success")

    store, second = client(run), leg.run_ids["mlflow"]
    assert second != first
    stored, earlier = store.get_run(second), store.get_run(first)
    points = store.get_metric_history(second, "loss")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2), (3, 30)]
    assert [point.step for point in store.get_metric_history(second, "a-x40-b")] == [1, 2]
    old, new = (store.get_metric_history(each, "loss")[0].timestamp for each in (first, second))
    assert old == new
    assert stored.data.params == {"lr": "0.25", "a-x40-b": "1", "width": "64"}
    assert (stored.info.run_name, stored.info.experiment_id) == (earlier.info.run_name, earlier.info.experiment_id)
    assert (stored.data.tags["team-x40-site"], stored.data.tags["loopwright.continues"]) == ("vision", first)
    assert (earlier.info.status, earlier.data.tags["loopwright.continued_by"]) == ("KILLED", second)
    assert earlier.data.params == {"lr": "0.5", "a-x40-b": "1"}
    assert (
        f"tracker 'mlflow' goes on behind step 2 in the run {second}: the earlier one, {first}, has 2 later rows, "
        "which MLflow can't remove."
    ) in caplog.messages


def test_a_run_without_later_rows_goes_on_itself(run: RunInfo) -> None:
    tracker = MLflowTracker()
    tracker.start(run, {"lr": 0.5})
    tracker.log({"loss": 1.0}, 2)
    tracker.finish("interrupted")
    first = run.run_ids["mlflow"]
    leg = replace(run, resumed_step=2)
    tracker.start(leg, {"lr": 0.25})
    tracker.finish("success")
    assert leg.run_ids["mlflow"] == first
    assert client(run).get_run(first).info.status == "FINISHED"


def test_flush_waits_for_what_was_logged_without_waiting(run: RunInfo) -> None:
    tracker = MLflowTracker()
    tracker.start(run, {})
    for step in range(50):
        tracker.log({"loss": 1.0}, step, synchronous=False)
    tracker.flush()
    assert len(client(run).get_metric_history(run.run_ids["mlflow"], "loss")) == 50
    tracker.log({"loss": 1.0}, 50, synchronous=False)
    tracker.finish("success")
    assert len(client(run).get_metric_history(run.run_ids["mlflow"], "loss")) == 51


@pytest.mark.slow
def test_a_killed_run_has_one_value_for_each_step(run: RunInfo) -> None:
    leg = resumed_leg(run, killed_leg(run, {"name": "mlflow"}))
    stored = TestContract().read(leg)
    assert (stored.series, stored.status) == (ONE_VALUE_FOR_EACH_STEP, "success")
