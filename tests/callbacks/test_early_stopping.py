"""`EarlyStopping` in real fits whose validation logs values that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright import ConfigError, EarlyStopping, MetricError, Task, Trainer

BATCHES = [torch.ones(1, 1), torch.ones(1, 1)]


class Scripted(Task):
    """Logs the given values as `val/loss`, one at each validation, and a NaN in the one tried before training."""

    def __init__(self, values: Sequence[float], name: str = "val/loss") -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.values = values
        self.name = name
        self.num_validations = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.state.stage == "sanity":
            self.log(self.name, math.nan)
            return
        self.log(self.name, self.values[self.num_validations])
        self.num_validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scored(Task):
    """Logs the given values as the epoch's mean of a training metric."""

    def __init__(self, values: Sequence[float], **options: Any) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.values = values
        self.options = options or {"on_step": False, "on_epoch": True}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("train/score", self.values[self.trainer.state.epoch], **self.options)
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_with(*callbacks: Any, **arguments: Any) -> Trainer:
    arguments = {"max_epochs": 10, "trackers": False, "progress": False, **arguments}
    return Trainer(callbacks=callbacks, **arguments)


def epochs_until_stop(stopping: EarlyStopping, values: Sequence[float], **arguments: Any) -> int:
    trainer = trainer_with(stopping, max_epochs=len(values), **arguments)
    trainer.fit(Scripted(values), BATCHES, [torch.ones(1, 1)])
    return trainer.state.epoch


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "epochs"),
    [
        ("min", 0.01, [0.500, 0.495, 0.491, 0.480], 3),
        ("max", 0.1, [1.00, 1.06, 1.12, 1.18], 4),  # the reference is the last accepted best: 1.12 beats 1.00 + 0.1
        ("min", 0.0, [1.0, 1.0, 1.0, 0.5], 3),  # an equal value is no improvement
    ],
)
def test_b49_gains_are_measured_from_the_last_accepted_best(
    mode: Any, min_delta: float, values: list[float], epochs: int
) -> None:
    stopping = EarlyStopping("val/loss", mode, patience=2, min_delta=min_delta)
    assert epochs_until_stop(stopping, values) == epochs


def test_b50_patience_is_counted_once_per_epoch_and_reset_by_a_new_best() -> None:
    stopping = EarlyStopping("val/loss", patience=2)
    assert epochs_until_stop(stopping, [1.0, 1.1, 0.9, 1.0, 1.1, 0.1, 0.1]) == 5
    assert stopping.best_score == 0.9
    assert stopping.best_step == 6  # two steps per epoch
    assert stopping.stop_reason == "val/loss has not improved in 2 checks; the best was 0.9 at step 6"


def test_reason_is_the_trainers() -> None:
    trainer = trainer_with(EarlyStopping("val/loss", patience=1, min_delta=0.5))
    trainer.fit(Scripted([1.0, 0.9]), BATCHES, [torch.ones(1, 1)])
    assert trainer.stop_reason is not None
    assert trainer.stop_reason.startswith("EarlyStopping: val/loss has not improved by more than 0.5 in 1 checks")


def test_every_validation_within_an_epoch_is_a_check() -> None:
    stopping = EarlyStopping("val/loss", patience=3)
    trainer = trainer_with(stopping, val_every=1)
    trainer.fit(Scripted([1.0, 2.0, 0.5, 2.0, 3.0, 4.0, 0.1]), BATCHES, [torch.ones(1, 1)])
    assert trainer.state.step == 6
    assert stopping.best_score == 0.5


def test_metric_of_training_is_checked_once_per_epoch() -> None:
    stopping = EarlyStopping("train/score", "max", patience=2)
    trainer = trainer_with(stopping)
    trainer.fit(Scored([1.0, 2.0, 1.5, 2.0, 9.0]), BATCHES)
    assert trainer.state.epoch == 4
    assert (stopping.best_score, stopping.best_step) == (2.0, 4)


def test_validation_that_is_not_due_is_no_check() -> None:
    stopping = EarlyStopping("val/loss", patience=1)
    trainer = trainer_with(stopping, val_every="2 epochs")
    trainer.fit(Scripted([1.0, 0.5, 0.7]), BATCHES, [torch.ones(1, 1)])
    assert trainer.state.epoch == 6


@pytest.mark.parametrize(
    ("options", "values", "epochs", "reason"),
    [
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.1], 2, "val/loss = 0.5 has reached the threshold 0.5"),
        ({"divergence_threshold": 5.0}, [1.0, 5.0, 5.1], 3, "val/loss = 5.1 is worse than the threshold 5"),
        ({}, [1.0, math.nan, 0.5], 2, "val/loss is nan"),
        ({}, [1.0, -math.inf, 0.5], 2, "val/loss is -inf"),
    ],
)
def test_thresholds_and_values_that_are_not_finite_end_at_once(
    options: dict[str, float], values: list[float], epochs: int, reason: str
) -> None:
    stopping = EarlyStopping("val/loss", patience=2, **options)  # type: ignore[arg-type]
    assert epochs_until_stop(stopping, values) == epochs
    assert stopping.stop_reason == reason


def test_b34_nan_is_never_best_and_any_finite_value_replaces_it() -> None:
    stopping = EarlyStopping("val/loss", patience=3, check_finite=False)
    values = [math.nan, 0.5, math.nan, 0.4, 0.6, -math.inf, 0.7]
    assert epochs_until_stop(stopping, values) == 7
    assert (stopping.best_score, stopping.best_step) == (0.4, 8)


def test_pain_18_patience_survives_a_resume_and_a_stopped_run_stays_stopped() -> None:
    first = EarlyStopping("val/loss", patience=3)
    trainer_with(first, max_epochs=3).fit(Scripted([1.0, 2.0, 3.0]), BATCHES, [torch.ones(1, 1)])
    assert first.stop_reason is None
    second = EarlyStopping("val/loss", patience=3)
    second.load_state_dict(first.state_dict())
    assert epochs_until_stop(second, [1.5, 0.1]) == 1
    third = EarlyStopping("val/loss", patience=3)
    third.load_state_dict(second.state_dict())
    trainer = trainer_with(third)
    trainer.fit(Scripted([0.1]), BATCHES, [torch.ones(1, 1)])
    assert trainer.state.step == 0
    assert trainer.stop_reason is not None
    assert "had stopped this run before: val/loss has not improved" in trainer.stop_reason
    patient = EarlyStopping("val/loss", patience=5)
    patient.load_state_dict(second.state_dict())
    assert epochs_until_stop(patient, [1.5, 1.5, 0.1]) == 2


@pytest.mark.filterwarnings("ignore:validation never ran")
def test_metric_of_validation_stays_one_after_a_resume() -> None:
    """The first epoch's end after a resume, with no validation yet, must not count the restored value again."""
    first = EarlyStopping("val/loss", patience=3)
    epochs_until_stop(first, [1.0])
    second = EarlyStopping("val/loss", patience=3)
    second.load_state_dict(first.state_dict())
    trainer_with(second, max_epochs=1, val_every="2 epochs").fit(Scripted([]), BATCHES, [torch.ones(1, 1)])
    assert second.wait == 0


def test_a_second_fit_begins_anew() -> None:
    stopping = EarlyStopping("val/loss", patience=1)
    assert epochs_until_stop(stopping, [1.0, 2.0, 0.1]) == 2
    assert epochs_until_stop(stopping, [3.0, 2.0, 2.5, 0.1]) == 3


def test_validation_outside_of_fit_is_no_check() -> None:
    stopping = EarlyStopping("val/loss", patience=1)
    trainer = trainer_with(stopping)
    trainer.validate(Scripted([1.0]), [torch.ones(1, 1)])
    assert stopping.best_score is None


def test_monitor_that_was_never_logged_is_named_with_those_that_were() -> None:
    trainer = trainer_with(EarlyStopping("val/los"))
    message = r"EarlyStopping\(monitor='val/los'\) was never logged. Did you mean 'val/loss'\? Accepted: val/loss"
    task = Scripted([1.0, 1.0])
    with pytest.raises(MetricError, match=message):
        trainer.fit(task, BATCHES, [torch.ones(1, 1)])
    assert task.num_validations == 1


def test_names_are_case_sensitive_and_the_nearest_is_named() -> None:
    trainer = trainer_with(EarlyStopping("VAL/LOSS"))
    with pytest.raises(MetricError, match="Names are case-sensitive: did you mean 'val/loss'"):
        trainer.fit(Scripted([1.0, 1.0]), BATCHES, [torch.ones(1, 1)])


def test_monitor_of_validation_without_validation_data_fails_after_the_first_epoch() -> None:
    trainer = trainer_with(EarlyStopping("val/loss"))
    with pytest.raises(MetricError, match=r"EarlyStopping\(monitor='val/loss'\) was never logged"):
        trainer.fit(Scripted([]), BATCHES)


def test_monitor_that_has_values_of_steps_alone_says_so() -> None:
    trainer = trainer_with(EarlyStopping("train/score"), log_every=3)
    with pytest.raises(MetricError, match=r"logged for single steps, .* Log it with on_step=False, on_epoch=True"):
        trainer.fit(Scored([1.0, 1.0], on_step=True), [torch.ones(1, 1)] * 4)


def test_run_that_ends_before_its_validation_is_no_error() -> None:
    trainer = trainer_with(EarlyStopping("val/loss"), max_epochs=None, max_steps=1)
    with pytest.warns(UserWarning, match="validation never ran: val_every='1 epoch' did not come due in 1 steps"):
        trainer.fit(Scripted([]), BATCHES, [torch.ones(1, 1)])
    assert trainer.state.step == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, r"patience=0\). Expected an integer >= 1"),
        ({"mode": "mim"}, r"mode='mim'\). Did you mean 'min'\?"),
        ({"patience": "3"}, r"EarlyStopping\(patience='3'\). Expected an integer >= 1"),
        ({"min_delta": -1.0}, r"min_delta=-1.0\). Expected a finite number >= 0. It is in the units of the metric"),
        ({"min_delta": "x"}, r"EarlyStopping\(min_delta='x'\). Expected a finite number >= 0"),
        ({"min_delta": math.inf}, r"min_delta=inf\). Expected a finite number"),
        ({"stopping_threshold": "0.1"}, r"stopping_threshold='0.1'\). Expected a number. It is a value of the metric"),
        ({"divergence_threshold": math.nan}, r"EarlyStopping\(divergence_threshold=nan\). Expected a number. .*leave"),
        ({"check_finite": "false"}, r"check_finite='false'\). Expected True or False"),
        ({"monitor": 5}, r"monitor=5\). Expected the name of a logged metric"),
        ({"monitor": ""}, r"monitor=''\). Expected the name of a logged metric"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**{"monitor": "val/loss", **arguments})
