from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.trackers.mlflow import MLflowTracker
from loopwright.trackers.names import original_name
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo, Tracker

from .contract import Stored, TrackerContract

STATUS = {"FINISHED": "success", "FAILED": "failed", "KILLED": "interrupted"}

# MLflow's own use of SQLAlchemy is deprecated there.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("quiet_mlflow")]


@pytest.fixture(scope="module")
def quiet_mlflow() -> Iterator[None]:
    """No calls home, and no server that the machine at hand may be set up for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


def client(run: RunInfo) -> Any:
    mlflow = pytest.importorskip("mlflow")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.directory.parent / 'mlflow.db'}")


class TestContract(TrackerContract):
    infinity = sys.float_info.max

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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the tests below: making one takes seconds."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def run(project: Path, request: pytest.FixtureRequest) -> RunInfo:
    return RunInfo(request.node.name, "digits", project / request.node.name)


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


def test_experiment_and_uri_of_the_caller(run: RunInfo, project: Path) -> None:
    tracker = MLflowTracker(f"sqlite:///{project / 'mlflow.db'}", experiment="mine")
    tracker.start(RunInfo("r", "digits", Path("elsewhere") / "r", run.run_ids), {})
    tracker.finish("success")
    store = client(run)
    stored = store.get_run(run.run_ids["mlflow"])
    assert store.get_experiment(stored.info.experiment_id).name == "mine"
    assert not Path("elsewhere").exists()


def test_uri_that_mlflow_was_told(run: RunInfo, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / 'mlflow.db'}")
    tracker = MLflowTracker()
    tracker.start(RunInfo("r", "digits", Path("elsewhere") / "r", run.run_ids), {})
    tracker.log({"loss": math.pi}, 1)
    tracker.finish("success")
    assert client(run).get_run(run.run_ids["mlflow"]).data.metrics == {"loss": math.pi}
    assert not Path("elsewhere").exists()


@pytest.mark.slow
def test_folder_with_signs_that_mean_something_in_a_url(tmp_path: Path) -> None:
    run = RunInfo("one", "digits", tmp_path / "größe %41?#" / "one")
    tracker = MLflowTracker()
    tracker.start(run, {})
    tracker.finish("success")
    assert (run.directory.parent / "mlflow.db").stat().st_size > 0
