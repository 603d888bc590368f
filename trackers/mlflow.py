"""`MLflowTracker`: MLflow, on a server or in a file of the project's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from ..distributed.imports import require
from ..distributed.paths import prove_writable
from .config import flatten_config
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened

NAMES = NameRule(accepted=r"[\w/.\- :]", is_path=True, max_length=250)
"""Names of metrics, parameters and tags: MLflow takes letters, digits, blanks and `_ - . / :`, as normal paths."""

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# MLflow's limits for one request and one parameter.
_METRICS_PER_REQUEST = 1000
_PARAMETERS_PER_REQUEST = 100
_PARAMETER_LENGTH = 6000
# What ends the path of a database's URL, or is read as an escape in it.
_URL_ESCAPES = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})


class MLflowTracker(Tracker):
    """Writes to MLflow through a client of its own; no run becomes MLflow's active run.

    Names that MLflow refuses are stored escaped (`recall@5` as `recall-x40-5`, see `names.original_name`). The
    configuration becomes parameters with dotted names, a text of over 6,000 characters cut. MLflow never changes a
    parameter: a resumed run, which goes on by its id in `RunInfo.run_ids`, adds those that are new. In an SQL store, as
    the default one, MLflow keeps an infinity as the largest float.

    Args:
        tracking_uri: the server or database. The default is the one that MLflow itself was told (`MLFLOW_TRACKING_URI`
            or `mlflow.set_tracking_uri`), and without that the file `mlflow.db` beside the run's folder.
        experiment: the experiment's name, in place of the run's project.
        tags: the run's tags.
        name: the tracker's name, where a run has two of them.
    """

    package: ClassVar[str | None] = "mlflow"
    extra: ClassVar[str | None] = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str | None = None,
        tags: Mapping[str, str] | None = None,
        name: str = "mlflow",
    ) -> None:
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.tags = dict(tags or {})
        self.name = name
        self._run: _OpenRun | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Create the run in its experiment, or take up the one of this id, and store the configuration.

        Raises:
            MissingDependencyError: mlflow is not installed.
            OSError: the default database can't be written.
        """
        mlflow = require("mlflow", extra="mlflow", purpose="MLflowTracker")
        uri, artifacts = self._store(mlflow, run.directory.parent)
        client = mlflow.MlflowClient(tracking_uri=uri)
        run_id = run.run_ids.get(self.name)
        if run_id is None:
            experiment_id = _experiment_id(mlflow, client, self.experiment or run.project, artifacts)
            tags = {NAMES.apply(key): value for key, value in self.tags.items()}
            run_id = str(client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)
            run.run_ids[self.name] = run_id
        else:
            client.update_run(run_id, status="RUNNING")
        self._run = _OpenRun(mlflow, client, run_id)
        try:
            self._run.log_parameters(flatten_config(config))
        except BaseException:
            self.finish("failed")
            raise

    def _store(self, mlflow: Any, project_directory: Path) -> tuple[str, str | None]:
        """The tracking URI, and where artifacts go if it is a file of ours."""
        if self.tracking_uri is not None:
            return self.tracking_uri, None
        if mlflow.tracking.is_tracking_uri_set():
            return mlflow.get_tracking_uri(), None
        directory = project_directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        database = directory / "mlflow.db"
        # MLflow itself would try again for minutes. SQLite needs the file, and its journal beside it.
        database.open("ab").close()
        prove_writable(directory)
        return f"sqlite:///{database.as_posix().translate(_URL_ESCAPES)}", (directory / "mlartifacts").as_uri()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one record, in one request for each thousand metrics.

        Raises:
            TrackerError: no run is open.
        """
        opened(self._run, self).log_metrics(metrics, step)

    @property
    def tracker(self) -> Any:
        """MLflow's `Run` while one is open, to be read; write by `mlflow.MlflowClient` and its id."""
        return None if self._run is None else self._run.client.get_run(self._run.run_id)

    def finish(self, status: Status) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        run, self._run = self._run, None
        if run is not None:
            run.client.set_terminated(run.run_id, _STATUS[status])


def _experiment_id(mlflow: Any, client: Any, name: str, artifacts: str | None) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifacts))
        except mlflow.exceptions.MlflowException:
            # Another process, of a sweep, may have made it in between.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


class _OpenRun:
    """One run of MLflow that is written to."""

    def __init__(self, mlflow: Any, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self._entities = mlflow.entities

    def log_parameters(self, config: Mapping[str, Any]) -> None:
        known = self.client.get_run(self.run_id).data.params
        texts = {NAMES.apply(key): _cut(str(value)) for key, value in config.items()}
        parameters = [self._entities.Param(key, text) for key, text in texts.items() if key not in known]
        for part in _parts(parameters, _PARAMETERS_PER_REQUEST):
            self.client.log_batch(self.run_id, params=part)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(NAMES.apply(name), float(value), now, step) for name, value in metrics.items()]
        for part in _parts(values, _METRICS_PER_REQUEST):
            self.client.log_batch(self.run_id, metrics=part)


def _cut(text: str) -> str:
    return text if len(text) <= _PARAMETER_LENGTH else text[: _PARAMETER_LENGTH - 3] + "..."


def _parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    iterator = iter(items)
    return list(iter(lambda: list(islice(iterator, size)), []))
