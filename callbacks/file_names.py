"""File names from a template with metrics and counters."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from ..checkpoint.shards import SUFFIX
from ..distributed.errors import ConfigError, MetricError, suggest
from .state import COUNTERS, RunState


class FileName:
    """A template such as `"{epoch}-{val/loss:.2f}"`, which gives `epoch=2-val_loss=0.10`, and the suffix of files.

    Each field is written as `name=value`. It names a counter of the run or a metric; what can't stand in a file name is
    replaced by `_`, so that no metric's name makes a folder.

    Args:
        template: text with fields.
        metrics_allowed: whether fields may name metrics.
        option: the argument's name, for errors.
        suffix: the end of each name.
    Raises:
        ConfigError: the template can't be read, names a folder, or, with `metrics_allowed=False`, names a metric.
    """

    def __init__(self, template: str, *, metrics_allowed: bool, option: str, suffix: str = SUFFIX) -> None:
        self._option = f"{option}={template!r}"
        self._suffix = suffix
        try:
            self._parts = list(string.Formatter().parse(template.removesuffix(SUFFIX)))
        except ValueError as error:
            raise ConfigError(
                f"{self._option} can't be read: {error}. Expected text with fields, '{{step}}'."
            ) from error
        for literal, field, _, conversion in self._parts:
            if "/" in literal or "\\" in literal:
                raise ConfigError(f"{self._option} names a folder. Choose the folder by directory=.")
            if field == "" or conversion:
                raise ConfigError(f"{self._option} has a field without a name, or with '!'. Expected '{{step}}'.")
            if field is not None and field not in COUNTERS and not metrics_allowed:
                raise ConfigError(
                    f"{self._option} names {field!r}. Without monitor= no save has a new value of a metric, so that "
                    f"only counters can be named. {suggest(field, COUNTERS)}"
                )

    @classmethod
    def of_metric(cls, metric: str) -> FileName:
        """The step and a metric's value, whatever the metric's name."""
        name = cls("{step}", metrics_allowed=True, option="filename")
        name._parts.append(("-", metric, ".4g", None))
        return name

    @property
    def is_fixed(self) -> bool:
        """Whether it has no fields, so that every file gets the same name."""
        return all(field is None for _, field, _, _ in self._parts)

    @property
    def has_metrics(self) -> bool:
        """Whether it names a metric, so that a save needs a new value of it."""
        return any(field is not None and field not in COUNTERS for _, field, _, _ in self._parts)

    def format(self, state: RunState, metrics: Mapping[str, float]) -> str:
        """The name with its suffix.

        Args:
            state: the counters.
            metrics: those that have a new value at this save.
        Raises:
            MetricError: a field is neither a counter nor one of the metrics.
        """
        values = {**metrics, **state.counters()}
        name = ""
        for literal, field, spec, _ in self._parts:
            name += literal
            if field is None:
                continue
            if field not in values:
                raise MetricError(f"{self._option}: {field!r} has no new value at this save. {suggest(field, values)}")
            name += f"{_clean(field)}={_formatted(values[field], spec or '', self._option)}"
        return name + self._suffix


def _formatted(value: float, spec: str, option: str) -> str:
    try:
        return format(value, spec)
    except ValueError as error:
        raise ConfigError(f"{option}: the format {spec!r} does not fit {value!r}: {error}.") from error


def _clean(name: str) -> str:
    return re.sub(r"[^\w.+@=-]", "_", name)
