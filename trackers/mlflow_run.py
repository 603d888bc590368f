"""One run of MLflow that is written to, by its client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from .files import Behind
from .names import NameRule
from .tracker import RunInfo

NAMES = NameRule(accepted=r"[\w/.\- :]", is_path=True, max_length=250)
"""Names of metrics, parameters and tags: MLflow takes letters, digits, blanks and `_ - . / :`, as normal paths."""

# MLflow's limits for one request and one parameter.
_METRICS_PER_REQUEST = 1000
_PARAMETERS_PER_REQUEST = 100
_PARAMETER_LENGTH = 6000


@dataclass(slots=True)
class LastStep:
    """The largest step that was written to a run, and how many values each metric has there, by its stored name."""

    step: int = -1
    values: dict[str, int] = field(default_factory=dict)

    def count(self, names: Iterable[str], step: int) -> None:
        """Take in one record."""
        if step > self.step:
            self.step, self.values = step, {}
        if step == self.step:
            for name in names:
                self.values[name] = self.values.get(name, 0) + 1


class MLflowRun:
    """One run of MLflow that is written to."""

    def __init__(self, entities: Any, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.last = LastStep()
        """What was written at the largest step."""
        self._entities = entities
        self._inherited: dict[str, str] = {}  # parameters of the run that this one is a copy of, by their stored names
        self._pending: list[Any] = []

    def split(self, run: RunInfo, last: LastStep | None) -> tuple[list[Any], int]:
        """Its values up to a checkpoint as new records, and how many came after it.

        Args:
            run: with the step that it resumes from.
            last: what the checkpoint knows of its last step; None: nothing, and all values of `resumed_step` stay.
        """
        kept, num_later = list[Any](), 0
        for name in self.client.get_run(self.run_id).data.metrics:
            known = run if last is None else replace(run, last_record=(last.step, last.values.get(name, 0)))
            is_behind = Behind(known)
            # MLflow promises no order. Of one step, the earlier ones are those that the checkpoint knows of.
            points = sorted(self.client.get_metric_history(self.run_id, name), key=lambda point: point.timestamp)
            of_run = [point for point in points if not is_behind(point.step)]
            num_later += len(points) - len(of_run)
            kept += [self._entities.Metric(each.key, each.value, each.timestamp, each.step) for each in of_run]
        return kept, num_later

    def copy(self, values: Sequence[Any]) -> MLflowRun:
        """A new run with its tags and these values, without its artifacts; the parameters follow with the new."""
        earlier = self.client.get_run(self.run_id)
        info = earlier.info
        tags = {key: value for key, value in earlier.data.tags.items() if not key.startswith("mlflow.")}
        tags["loopwright.continues"] = self.run_id
        created = self.client.create_run(info.experiment_id, info.start_time, tags, info.run_name)
        copy = MLflowRun(self._entities, self.client, str(created.info.run_id))
        copy._inherited = dict(earlier.data.params)
        copy._send(values, synchronous=True)
        self.client.set_tag(self.run_id, "loopwright.continued_by", copy.run_id)
        if info.status == "RUNNING":
            self.client.set_terminated(self.run_id, "KILLED")
        return copy

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
        self.last.count([value.key for value in values], step)

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
