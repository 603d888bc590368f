"""Watching one metric: where its values come from, and what counts as better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ..distributed.errors import ConfigError, MetricError, check_number, suggest

if TYPE_CHECKING:
    from .view import TrainerView

Mode: TypeAlias = Literal["min", "max"]


class Monitor:
    """One metric that a callback watches, and what counts as better.

    A metric of validation has a value at each validation, and only there; any other at the end of each whole epoch in
    which it was recorded. So no value is read twice, and none is taken for newer than it is. The callback passes its
    events on: `start`, `note`, `at_validation`, `at_epoch_end`.

    Args:
        name: the metric's name, case-sensitive.
        mode: whether lower (`"min"`) or higher (`"max"`) is better.
        min_delta: a value is better than another if it is so by more than this.
        owner: the callback's name, for errors.
    Raises:
        ConfigError: an argument can't be used.
    """

    def __init__(self, name: str, mode: Mode = "min", min_delta: float = 0.0, *, owner: str) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{owner}(monitor={name!r}). Expected the name of a logged metric, such as 'val/loss'.")
        if mode not in get_args(Mode):
            raise ConfigError(f"{owner}(mode={mode!r}). {suggest(mode, get_args(Mode))}")
        hint = "It is in the units of the metric."
        check_number(f"{owner}(min_delta)", min_delta, least=0, allows_infinity=False, hint=hint)
        self.name = name
        self.mode = mode
        self.min_delta = float(min_delta)
        self._owner = owner
        self._is_from_validation = False
        self._has_validated = False
        self._recorded_at: dict[str, int] = {}
        self._restored_at: dict[str, int] = {}

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether `value` is better than another one by more than `min_delta`.

        What is finite is better than NaN, infinities and None, whatever the mode; those are never better.
        """
        if not math.isfinite(value):
            return False
        if than is None or not math.isfinite(than):
            return True
        return value < than - self.min_delta if self.mode == "min" else value > than + self.min_delta

    def reaches(self, value: float, threshold: float) -> bool:
        """Whether `value` is finite and as good as a threshold, or better."""
        return math.isfinite(value) and (value <= threshold if self.mode == "min" else value >= threshold)

    def is_worse(self, value: float, threshold: float) -> bool:
        """Whether `value` is worse than a threshold; NaN is not."""
        return value > threshold if self.mode == "min" else value < threshold

    def start(self) -> None:
        """A fit begins, or goes on."""
        self._has_validated = False
        self._recorded_at, self._restored_at = self._restored_at, {}

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """A record is made: what it holds has new values at this step."""
        self._recorded_at.update(dict.fromkeys(metrics, step))

    def recorded_now(self, trainer: TrainerView, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of the metrics that have a new value at the current step."""
        return {n: value for n, value in metrics.items() if self._recorded_at.get(n) == trainer.state.step}

    def at_validation(self, trainer: TrainerView, metrics: Mapping[str, float]) -> float | None:
        """The new value at the end of a validation, None if the metric is none of validation."""
        if trainer.error is not None:
            return None
        self._has_validated = True
        if self.name not in metrics:
            return None
        self._is_from_validation = True
        return float(metrics[self.name])

    def at_epoch_end(self, trainer: TrainerView, metrics: Mapping[str, float]) -> float | None:
        """The new value at the end of an epoch, None if there is none: validation logs it, or the epoch was cut.

        Raises:
            MetricError: the metric should be there by now and was never logged; lists those that were.
        """
        if trainer.error is not None or not trainer.state.epoch_ended or self._is_from_validation:
            return None
        if trainer.validation_was_cut:
            return None  # the epoch is not over, and has no record yet
        if self.name not in self._recorded_at and self.name not in trainer.metrics:
            if self._has_validated or not trainer.has_validation:
                raise self._never_logged(trainer, metrics)
            return None  # validation was not due yet
        if self._recorded_at.get(self.name) != trainer.state.step:
            raise MetricError(
                f"{self._owner}(monitor={self.name!r}): it is logged for single steps, so that the epoch has no value "
                "of it. Log it with on_step=False, on_epoch=True; or with on_epoch=True alone, and monitor "
                f"'{self.name}_epoch'."
            )
        return float(metrics[self.name])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"is_from_validation": self._is_from_validation, "recorded_at": dict(self._recorded_at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._is_from_validation = bool(state["is_from_validation"])
        self._restored_at = dict(state["recorded_at"])

    def _never_logged(self, trainer: TrainerView, metrics: Mapping[str, float]) -> MetricError:
        names = {*metrics, *trainer.metrics} - {"epoch"}
        same = next((name for name in sorted(names) if name.lower() == self.name.lower()), None)
        hint = f"Names are case-sensitive: did you mean {same!r}? " if same else ""
        return MetricError(
            f"{self._owner}(monitor={self.name!r}) was never logged. {hint}{suggest(self.name, names)} "
            "Log it in validation_step, or in training_step with on_step=False, on_epoch=True."
        )
