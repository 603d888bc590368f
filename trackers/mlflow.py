"""`MLflowTracker`: MLflow, on a server or in a file of the project's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..distributed.errors import ConfigError
from ..distributed.imports import require
from ..distributed.paths import prove_writable
from .config import flatten_config
from .mlflow_run import NAMES, LastStep, MLflowRun
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened

logger = logging.getLogger(__name__)

STEP = "step"
"""The column of a table that holds the step."""
_PICTURES = NameRule(accepted=r"[A-Za-z0-9_.\- /]", is_path=True, max_length=250)
"""Names of pictures and of files."""

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# What ends the path of a database's URL, or is read as an escape in it.
_URL_ESCAPES = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})


class MLflowTracker(Tracker):
    """Writes to MLflow through a client of its own; no run becomes MLflow's active run.

    Names that MLflow refuses are stored escaped (`recall@5` as `recall-x40-5`, see `names.original_name`). The
    configuration becomes parameters with dotted names, a text of over 6,000 characters cut. In an SQL store, as the
    default one, MLflow keeps an infinity as the largest float.

    A resumed run goes on by its id in `RunInfo.run_ids`. MLflow never changes a parameter, so it adds those that are
    new; and it never removes a metric, so where an earlier leg wrote values after the checkpoint that is resumed from,
    the run goes on in a copy with the metrics up to there, the tags, and the parameters, the new ones first. The copy
    is tagged `loopwright.continues` with the earlier run's id, that one `loopwright.continued_by`. Artifacts stay with
    the earlier one.

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
        self._run: MLflowRun | None = None
        self._saved: LastStep | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Create the run in its experiment, or take up the one of this id, and store the configuration.

        Raises:
            MissingDependencyError: mlflow is not installed.
            OSError: the default database can't be written.
        """
        mlflow = require("mlflow", extra="mlflow", purpose="MLflowTracker")
        uri, artifacts = self._store(mlflow, run.directory.parent)
        client = mlflow.MlflowClient(tracking_uri=uri)
        run_id, saved, self._saved = run.run_ids.get(self.name), self._saved, None
        if run_id is None:
            experiment_id = _experiment_id(mlflow, client, self.experiment or run.project, artifacts)
            tags = {NAMES.apply(key): value for key, value in self.tags.items()}
            run_id = str(client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)
            self._run = MLflowRun(mlflow.entities, client, run_id)
        else:
            self._run = self._continue(MLflowRun(mlflow.entities, client, run_id), run, saved)
            self._run.last = saved or LastStep()
        try:
            self._run.log_parameters(flatten_config(config))
        except BaseException:
            self.finish("failed")
            raise
        run.run_ids[self.name] = self._run.run_id

    def _continue(self, earlier: MLflowRun, run: RunInfo, saved: LastStep | None) -> MLflowRun:
        """The run to go on with: the earlier leg's, or its copy if that leg wrote values after the checkpoint."""
        values, num_later = ([], 0) if run.resumed_step is None else earlier.split(run, saved)
        if num_later:
            copy = earlier.copy(values)
            logger.info(
                "tracker %r goes on behind step %d in the run %s: the earlier one, %s, has %d later rows, which MLflow "
                "can't remove.",
                self.name,
                run.resumed_step,
                copy.run_id,
                earlier.run_id,
                num_later,
            )
            return copy
        earlier.client.update_run(earlier.run_id, status="RUNNING")
        return earlier

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

    def log(
        self,
        metrics: Mapping[str, float],
        step: int | None = None,
        *,
        timestamp: int | None = None,
        synchronous: bool | None = None,
    ) -> None:
        """Write one record, in one request for each thousand metrics.

        Args:
            metrics: by name.
            step: the step that they belong to; None: 0.
            timestamp: milliseconds since 1970 that stand in place of now.
            synchronous: False: go on before MLflow has them.
        Raises:
            TrackerError: no run is open.
        """
        opened(self._run, self).log_metrics(metrics, step or 0, timestamp, synchronous)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write pictures as artifacts below `images`, which MLflow shows by name and step.

        Args:
            values: several by name: arrays of shape (height, width, channels), or pictures of PIL.
            step: the step that they belong to; None: 0.
            options: of `MlflowClient.log_image`, such as `synchronous`.
        Raises:
            TrackerError: no run is open.
        """
        run = opened(self._run, self)
        for name, images in values.items():
            for image in images:
                plain = image.numpy(force=True) if isinstance(image, Tensor) else image
                run.client.log_image(run.run_id, plain, key=_PICTURES.apply(name), step=step or 0, **options)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Write a table as the artifact `<table_name>.json`; rows of a second call are added to the first one's.

        Args:
            table_name: its name.
            columns: the names of its columns.
            data: its rows.
            dataframe: a pandas data frame in place of both.
            step: the step that its rows belong to; it becomes their column `step`.
            options: none.
        Raises:
            TrackerError: no run is open.
            ConfigError: there are neither columns and rows nor a data frame, or there is an option.
        """
        run = opened(self._run, self)
        if options or (dataframe is None and (columns is None or data is None)):
            raise ConfigError(
                f"log_table({table_name!r}) of MLflowTracker got columns={columns!r:.80}, data={data!r:.80}, options "
                f"{sorted(options)}. Expected columns=[...] and data=[[...], ...], or dataframe=..., and no more."
            )
        if dataframe is None:
            assert columns is not None and data is not None
            dataframe = {name: [row[index] for row in data] for index, name in enumerate(columns)}
        table = {name: list(dataframe[name]) for name in dataframe}
        if step is not None:
            rows = len(next(iter(table.values()), []))
            table = {STEP: [step] * rows} | table
        run.client.log_table(run.run_id, table, f"{_PICTURES.apply(table_name)}.json")

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Write a figure of matplotlib or plotly as the artifact `artifact_file`; Accelerate's name.

        Raises:
            TrackerError: no run is open.
        """
        run = opened(self._run, self)
        run.client.log_figure(run.run_id, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file to the run's artifacts, into the folder `artifact_path` there; Accelerate's name.

        Raises:
            TrackerError: no run is open.
        """
        run = opened(self._run, self)
        run.client.log_artifact(run.run_id, local_path, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy a folder's content to the run's artifacts, into the folder `artifact_path` there; Accelerate's name.

        Raises:
            TrackerError: no run is open.
        """
        run = opened(self._run, self)
        run.client.log_artifacts(run.run_id, local_dir, artifact_path)

    def flush(self) -> None:
        """Wait for what was logged with `synchronous=False`; everything else is there."""
        if self._run is not None:
            self._run.wait()

    def state_dict(self) -> dict[str, Any]:
        """What was written at the largest step."""
        return {} if self._run is None else {"step": self._run.last.step, "values": dict(self._run.last.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self._saved = LastStep(state["step"], dict(state["values"])) if state else None

    @property
    def tracker(self) -> Any:
        """MLflow's `Run` while one is open, to be read; write by `mlflow.MlflowClient` and its id."""
        return None if self._run is None else self._run.client.get_run(self._run.run_id)

    def finish(self, status: Status) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.wait()
            finally:
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
