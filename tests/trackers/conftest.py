"""What the tests of several trackers share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopwright.trackers.mlflow import MLflowTracker
from loopwright.trackers.tracker import RunInfo

# Asserts in the contract show their values when they fail, as those in test modules do.
pytest.register_assert_rewrite("tests.trackers.contract")


def hide_wandb_settings(patch: pytest.MonkeyPatch) -> None:
    """No trace in wandb of the machine at hand, and none of wandb afterwards."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_SERVICE"):
        patch.setenv(name, "")  # remembers what was there, so that what wandb sets is undone
        patch.delenv(name)
    patch.setenv("WANDB_SILENT", "true")


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables and nothing more to speak of: making one takes seconds."""
    run = RunInfo("first", "first", tmp_path_factory.mktemp("mlflow") / "first")
    tracker = MLflowTracker()
    tracker.start(run, {})
    tracker.finish("success")
    return run.directory.parent / "mlflow.db"


@pytest.fixture(scope="module")
def mlflow_environment() -> Iterator[None]:
    """No calls home, and no server that the machine at hand may be set up for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


@pytest.fixture(scope="module")
def mlflow_project(mlflow_environment: None, mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's folder in which MLflow's database is there already."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(mlflow_database, folder)
    return folder
