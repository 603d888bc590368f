"""What one run leaves for the next, for another around it, and for whoever waits for it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import EndEpoch, StopRun
from loopwright.distributed.errors import ConfigError, MetricError, TaskError
from loopwright.distributed.positions import HERE
from loopwright.trackers.memory import MemoryTracker

from .tiny import Scalar, Scheduled, Watch, batches, fit, ones, tracked, trainer


class Interrupted(MemoryTracker):
    """A tracker whose end is interrupted."""

    def finish(self, status: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_at_the_very_end_leaves_the_trainer_usable() -> None:
    found, task = trainer(trackers=Interrupted()), Scalar()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            found.fit(task, ones(1))
    assert task.value == -2
    with pytest.raises(TaskError, match="no trainer runs this task"):
        _ = task.trainer


def test_another_trainer_on_the_same_task_inside_a_run() -> None:
    seen: list[float] = []

    class Logs(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("a", batch.mean())
            return super().training_step(batch, batch_idx)

    def look(outer: Any, task: Any, metrics: Any) -> None:
        seen.append(trainer().validate(task, batches(1, 3))["val"])
        assert task.trainer is outer

    found = fit(Logs(), ones(2), max_epochs=2, callbacks=Watch(epoch_end=look))
    assert (seen, found.state.step) == ([2, 2], 4)


def test_reports_say_which_run_and_event_a_process_is_in() -> None:
    seen: list[str] = []

    def look(*values: Any) -> None:
        seen.append(str(HERE))

    fit(Scalar(), ones(3))
    watched = Watch(fit_start=look, epoch_start=look, validation_start=look, epoch_end=look, fit_end=look)
    fit(Scalar(), ones(2), ones(1), callbacks=watched)
    events = [("on_fit_start", 0), ("on_epoch_start", 0), ("on_validation_start", 2), ("on_epoch_end", 2)]
    assert seen == [f"{event}, step {step}, outside any collective" for event, step in [*events, ("on_fit_end", 2)]]


@pytest.mark.parametrize(("steering", "steps"), [(EndEpoch, 6), (StopRun, 2)])
def test_a_step_that_was_taken_is_counted_when_on_step_ends_the_epoch(steering: Any, steps: int) -> None:
    def end(trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2:
            raise steering

    task = Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.5), interval="step")
    found = fit(task, [torch.ones(3)] * 4, max_epochs=2, callbacks=Watch(step=end))
    state = found.state
    assert (state.step, state.micro_step, state.samples) == (steps, steps, 3 * steps)
    assert task.optimizer.param_groups[0]["lr"] == 0.5**steps


class TestCounts:
    @pytest.mark.parametrize("make", [np.int64, torch.tensor, lambda n: np.array(n), int])
    def test_samples_of_other_integers(self, make: Any) -> None:
        class Counts(Scalar):
            def count_samples(self, batch: Tensor) -> Any:
                return make(len(batch))

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("val", float(len(batch)))

        data = [torch.ones(1), torch.ones(9)]
        found = fit(Counts(), data)
        assert found.state.samples == 10
        assert trainer().validate(Counts(), data) == {"val": 8.2}

    @pytest.mark.parametrize("answer", [-3, "3", 2.5, True, torch.tensor([1, 2]), torch.tensor(2.0)])
    @pytest.mark.parametrize("hook", ["count_samples", "count_tokens"])
    def test_what_is_no_count(self, hook: str, answer: Any) -> None:
        task = type("Counts", (Scalar,), {hook: lambda self, batch: answer})()
        with pytest.raises(TaskError, match=r"returned .*\. Expected an integer >= 0"):
            fit(task, ones(1))


class TestWeights:
    def test_a_tensor_that_changes_later(self) -> None:
        size = torch.zeros((), dtype=torch.int64)

        class Logs(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("val", float(len(batch)), batch_size=size.fill_(len(batch)))

        assert trainer().validate(Logs(), [torch.ones(1), torch.ones(9)]) == {"val": 8.2}

    @pytest.mark.parametrize(
        ("name", "value", "options", "message"),
        [
            ("a", 1.0, {"batch_size": "a"}, r"with the weight 'a'\. Expected a number"),
            ("a", 1.0, {"batch_size": torch.ones(2)}, "with the weight tensor"),
            ("a", 1.0, {"batch_size": True}, "with the weight True"),
            (5, 1.0, {}, "Expected the metric's name"), ("", 1.0, {}, "Expected the metric's name"),
            ("epoch", 1.0, {}, "each record has this name already"),
            ("a", torch.tensor(1j), {}, "of a complex number"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_logged(self, name: Any, value: Any, options: Any, message: str) -> None:
        class Logs(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log(name, value, **options)

        with pytest.raises(MetricError, match=message):
            fit(Logs(), ones(1))

    def test_a_numpy_weight(self) -> None:
        class Logs(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.log("a", float(batch_idx), on_step=False, on_epoch=True, batch_size=np.int32(1 + 2 * batch_idx))
                return super().training_step(batch, batch_idx)

        ((_, metrics),) = tracked(Logs(), ones(2))
        assert metrics["a"] == 0.75
        assert type(metrics["a"]) is float


def test_a_schedule_of_another_optimizer() -> None:
    class Mixed(Scalar):
        def configure_optimizers(self) -> Any:
            first, second = (torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(2))
            return first, ExponentialLR(second, 0.5)

    with pytest.raises(TaskError, match=r"ExponentialLR moves the rates of another SGD .* Build it on the returned"):
        fit(Mixed(), ones(1))


def test_the_gradient_mode_is_put_back() -> None:
    class Leaks(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            torch.set_grad_enabled(batch_idx < 1)
            return loss

    with torch.no_grad():
        fit(task := Leaks(), ones(2))
    assert torch.is_grad_enabled()
    assert task.value == -2


def test_the_data_is_let_go() -> None:
    found, loader = trainer(), DataLoader([torch.ones(1)] * 2)
    found.fit(Scalar(), loader, loader)
    found.validate(Scalar(), loader)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None  # by its references alone: workers that persist end with it


def test_unnamed_runs_that_begin_in_the_same_second() -> None:
    folders = set()
    for _ in range(20):
        found = trainer()
        found.fit(Scalar(), ones(1))
        folders.add(found.run_directory)
    assert len(folders) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 5}, "name=5"), ({"name": "a\0b"}, "name="), ({"name": "a" * 300}, "at most 200 bytes"),
        ({"project_dir": None}, "project_dir=None"), ({"project_dir": 5}, "project_dir=5"),
        ({"callbacks": 5}, "callbacks=5"), ({"callbacks": "EarlyStopping"}, "callbacks='EarlyStopping'"),
        ({"limit_batches": float("nan")}, "limit_batches"), ({"limit_batches": 2**70}, "limit_batches"),
        ({"sanity_val_batches": -1}, "sanity_val_batches=-1"), ({"seed": 2**40}, "seed="),
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_kind(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**options)


def test_callbacks_may_be_none() -> None:
    assert trainer(callbacks=None).callbacks == ()
