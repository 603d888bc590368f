"""One run of MLflow that is written to, by its client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from .names import NameRule

NAMES = NameRule(accepted=r"[\w/.\- :]", is_path=True, max_length=250)
"""Names of metrics, parameters and tags: MLflow takes letters, digits, blanks and `_ - . / :`, as normal paths."""

# MLflow's limits for one request and one parameter.
_METRICS_PER_REQUEST = 1000
_PARAMETERS_PER_REQUEST = 100
_PARAMETER_LENGTH = 6000


class MLflowRun:
    """One run of MLflow that is written to."""

    def __init__(self, entities: Any, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self._entities = entities
        self._inherited: dict[str, str] = {}  # parameters of the run that this one is a copy of, by their stored names
        self._pending: list[Any] = []

    def count_later(self, last_step: int) -> int:
        """How many values of larger steps it has."""
        return sum(point.step > last_step for point in self._history())

    def copy(self, last_step: int) -> MLflowRun:
        """A new run with everything but artifacts and values of larger steps; the parameters follow with the new."""
        earlier = self.client.get_run(self.run_id)
        info = earlier.info
        tags = {key: value for key, value in earlier.data.tags.items() if not key.startswith("mlflow.")}
        tags["loopwright.continues"] = self.run_id
        created = self.client.create_run(info.experiment_id, info.start_time, tags, info.run_name)
        copy = MLflowRun(self._entities, self.client, str(created.info.run_id))
        copy._inherited = dict(earlier.data.params)
        copy._send([point for point in self._history() if point.step <= last_step], synchronous=True)
        self.client.set_tag(self.run_id, "loopwright.continued_by", copy.run_id)
        if info.status == "RUNNING":
            self.client.set_terminated(self.run_id, "KILLED")
        return copy

    def _history(self) -> list[Any]:
        """Every value of every metric, as a new record."""
        points = [
            point
            for name in self.client.get_run(self.run_id).data.metrics
            for point in self.client.get_metric_history(self.run_id, name)
        ]
        return [self._entities.Metric(point.key, point.value, point.timestamp, point.step) for point in points]

    def log_parameters(self, config: Mapping[str, Any]) -> None:
        """Store the configuration, flat; parameters that it has already stay as they are."""
        known = self.client.get_run(self.run_id).data.params
        texts = self._inherited | {NAMES.apply(key): _cut(str(value)) for key, value in config.items()}
        parameters = [self._entities.Param(key, text) for key, text in texts.items() if key not in known]
        for part in _parts(parameters, _PARAMETERS_PER_REQUEST):
            self.client.log_batch(self.run_id, params=part)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, timestamp: int | None, synchronous: bool | None
    ) -> None:
        """Write one record, in one request for each thousand metrics."""
        now = int(time.time() * 1000) if timestamp is None else timestamp
        values = [self._entities.Metric(NAMES.apply(name), float(value), now, step) for name, value in metrics.items()]
        self._send(values, synchronous)

    def wait(self) -> None:
        """Until MLflow has everything."""
        pending, self._pending = self._pending, []
        for operation in pending:
            operation.wait()

    def _send(self, values: Sequence[Any], synchronous: bool | None) -> None:
        for part in _parts(values, _METRICS_PER_REQUEST):
            operation = self.client.log_batch(self.run_id, metrics=part, synchronous=synchronous)
            if operation is not None:
                self._pending.append(operation)


def _cut(text: str) -> str:
    return text if len(text) <= _PARAMETER_LENGTH else text[: _PARAMETER_LENGTH - 3] + "..."


def _parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    iterator = iter(items)
    return list(iter(lambda: list(islice(iterator, size)), []))
