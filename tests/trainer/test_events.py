"""The events: their order, their pairs, and the three exceptions that steer the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.callbacks.bus import EVENTS
from loopwright.callbacks.callback import Callback, ControlFlow, EndEpoch, SkipBatch, StopRun
from loopwright.distributed.errors import ConfigError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from .tiny import Recorder, Scalar, Watch, batches, fit, ones, trainer


class Detailed(Recorder):
    """Writes down what each event was given as well."""

    def describe(self, event: str, trainer: Any, values: Sequence[Any]) -> str:
        return " ".join([event, *map(short, values)])


def short(value: Any) -> str:
    match value:
        case Tensor():
            return f"{value.item():g}"
        case torch.optim.Optimizer():
            return type(value).__name__
        case dict():
            return " ".join(f"{name}={number:g}" for name, number in value.items())
        case None | int():
            return str(value)
        case _:
            return str(value.value)


class Logged(Scalar):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", batch.mean(), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_the_order_of_events_in_fit() -> None:
    recorder = Detailed()
    fit(
        Logged(), batches(1, 2, 3), batches(5, 7),
        max_epochs=2, accumulate=2, log_every=1, sanity_val_batches=2, callbacks=recorder,
    )  # fmt: skip
    assert recorder.log == [
        "setup",
        "fit_start",
        "epoch_start",
        "batch_start 1 0", "before_backward 0", "backward 0", "batch_end 0",
        "batch_start 2 1", "before_backward 0", "backward 0",
        "before_step SGD", "step applied", "batch_end 0",
        "log loss_step=1.5 epoch=0.666667 1",
        "batch_start 3 2", "before_backward -4.5", "backward -4.5",
        "before_step SGD", "step applied", "batch_end -4.5",
        "log loss_step=3 epoch=1 2",
        "validation_start",
        "validation_batch_start 5 0", "validation_batch_end None",
        "validation_batch_start 7 1", "validation_batch_end None",
        "validation_end val=6",
        "log val=6 epoch=1 2",
        "log loss_epoch=2 epoch=1 2",
        "epoch_end loss_step=3 epoch=1 val=6 loss_epoch=2",
        "epoch_start",
        "batch_start 1 0", "before_backward -4.5", "backward -4.5", "batch_end -4.5",
        "batch_start 2 1", "before_backward -9", "backward -9",
        "before_step SGD", "step applied", "batch_end -9",
        "log loss_step=1.5 epoch=1.66667 3",
        "batch_start 3 2", "before_backward -18", "backward -18",
        "before_step SGD", "step applied", "batch_end -18",
        "log loss_step=3 epoch=2 4",
        "validation_start",
        "validation_batch_start 5 0", "validation_batch_end None",
        "validation_batch_start 7 1", "validation_batch_end None",
        "validation_end val=6",
        "log val=6 epoch=2 4",
        "log loss_epoch=2 epoch=2 4",
        "epoch_end loss_step=3 epoch=2 val=6 loss_epoch=2",
        "stop",
        "fit_end",
        "teardown",
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_order_of_events_in_an_evaluation(stage: str) -> None:
    recorder = Recorder()
    found = trainer(callbacks=recorder)
    getattr(found, stage)(Scalar(), batches(5, 7))
    name = {"validate": "validation"}.get(stage, stage)
    batch = [f"{name}_batch_start", f"{name}_batch_end"]
    log = [] if stage == "predict" else ["log"]
    assert recorder.log == ["setup", f"{name}_start", *batch, *batch, f"{name}_end", *log, "teardown"]


def test_every_event_of_the_declaration_is_in_the_docstring_or_told_of_there() -> None:
    import loopwright.callbacks.callback as module

    told = module.__doc__ or ""
    for event in EVENTS:
        stages = ("on_validation", "on_test", "on_predict")
        assert event in told or event.startswith(stages), event


def test_what_is_so_at_each_event() -> None:
    seen: dict[str, Any] = {}
    task = Scalar()

    def see(event: str) -> Any:
        def look(trainer: Any, task: Any, *values: Any) -> None:
            grad = None if task.w.grad is None else task.w.grad.item()
            seen.setdefault(event, (trainer.state.step, trainer.state.micro_step, task.w.item(), grad, task.training))

        return look

    events = [name.removeprefix("on_") for name in EVENTS]
    fit(task, batches(2, 4), batches(1), accumulate=2, callbacks=Watch(**{event: see(event) for event in events}))
    expected = {
        "setup": (0, 0, 0, None, True),
        "fit_start": (0, 0, 0, None, True),
        "epoch_start": (0, 0, 0, None, True),
        "batch_start": (0, 0, 0, None, True),
        "before_backward": (0, 0, 0, None, True),
        "backward": (0, 0, 0, 1, True),
        "batch_end": (0, 1, 0, 1, True),
        "before_step": (0, 1, 0, 3, True),
        "step": (1, 1, -3, 3, True),
        "validation_start": (1, 2, -3, None, False),
        "validation_batch_start": (1, 2, -3, None, False),
        "validation_batch_end": (1, 2, -3, None, False),
        "validation_end": (1, 2, -3, None, False),
        "log": (1, 2, -3, None, True),
        "epoch_end": (1, 2, -3, None, True),
        "stop": (1, 2, -3, None, True),
        "fit_end": (1, 2, -3, None, True),
        "teardown": (1, 2, -3, None, True),
    }
    assert seen == expected


def test_a_task_that_is_a_callback_comes_first() -> None:
    log: list[str] = []

    class Both(Scalar, Callback):
        def on_fit_start(self, trainer: Any, task: Any) -> None:
            assert task is self
            log.append("task")

    fit(Both(), ones(1), callbacks=Watch(fit_start=lambda *_: log.append("callback")))
    assert log == ["task", "callback"]


def test_a_batch_may_be_changed_in_place() -> None:
    task = Scalar()
    fit(task, [torch.ones(1)], callbacks=Watch(batch_start=lambda trainer, task, batch, index: batch.mul_(5)))
    assert task.value == -5


def test_gradients_may_be_changed_before_the_step() -> None:
    task = Scalar()
    fit(task, ones(2), callbacks=Watch(before_step=lambda trainer, task, optimizer: task.w.grad.add_(1)))
    assert task.value == -4


def test_metrics_may_be_added_to_a_record_and_to_a_validation() -> None:
    memory = MemoryTracker()
    found = fit(
        Logged(), ones(2), batches(4), log_every=1, trackers=memory,
        callbacks=[
            Watch(
                log=lambda trainer, task, metrics, step: metrics.setdefault("more", step * 10),
                validation_end=lambda trainer, task, metrics: metrics.update(best=metrics["val"] + 1),
            ),
            Watch(validation_end=lambda trainer, task, metrics: metrics.update(later=metrics["best"] + 1)),
        ],
    )  # fmt: skip
    assert memory.runs[0].series("more") == [(1, 10), (2, 20), (2, 20), (2, 20)]
    assert memory.runs[0].records[2] == (2, {"val": 4, "best": 5, "later": 6, "epoch": 1, "more": 20})
    assert found.metrics["later"] == 6


# Pairs.

PAIRS = [
    ("setup", "teardown"),
    ("fit_start", "fit_end"),
    ("epoch_start", "epoch_end"),
    ("batch_start", "batch_end"),
    ("validation_start", "validation_end"),
    ("validation_batch_start", "validation_batch_end"),
]


def balanced(recorder: Recorder) -> None:
    for start, end in PAIRS:
        assert recorder.count(start) == recorder.count(end), (start, end, recorder.log)
    # They nest: each end is that of the newest start which is open.
    ends = {end: start for start, end in PAIRS}
    open_ones: list[str] = []
    for event in recorder.log:
        if event in dict(PAIRS):
            open_ones.append(event)
        elif event in ends:
            assert open_ones.pop() == ends[event], recorder.log


IN_FIT = [
    "setup", "fit_start", "epoch_start", "batch_start", "before_backward", "backward", "before_step", "step",
    "batch_end", "validation_start", "validation_batch_start", "validation_batch_end", "validation_end", "log",
    "epoch_end", "fit_end", "teardown",
]  # fmt: skip


@pytest.mark.parametrize(
    "error", [ValueError("broken"), StopIteration("broken"), KeyboardInterrupt("broken")], ids=repr
)
@pytest.mark.parametrize("event", IN_FIT)
def test_an_exception_in_any_event(event: str, error: BaseException) -> None:
    first, last = Recorder(), Recorder()
    failing = Recorder(fail={event: error})
    memory = MemoryTracker()
    found = trainer(callbacks=[first, failing, last], trackers=memory, log_every=1, accumulate=2)
    with pytest.raises(type(error), match="broken") as caught:
        found.fit(Logged(), ones(3), ones(1))
    assert caught.value is error
    assert f"raised by Recorder in on_{event}, at step" in "\n".join(error.__notes__)
    for recorder in (first, failing):
        balanced(recorder)
        assert recorder.count("exception") == recorder.count("teardown") == 1
        assert recorder.log[-1] == ("exception" if event == "teardown" else "teardown")
    assert found.error is error
    # The last one misses nothing that ends.
    for end in ("teardown", "exception"):
        assert last.count(end) == first.count(end)
    statuses = [run.status for run in memory.runs]
    expected = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    assert statuses == ([] if event == "setup" else [expected])
    del error.__notes__


class FailsIn(Scalar):
    """Raises in one of its own methods, at its second batch."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self.error = error

        def fail(batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise error
            return getattr(Scalar, method)(self, batch, batch_idx)

        self.__dict__[method] = fail


@pytest.mark.parametrize(
    "error", [ValueError("broken"), StopIteration("broken"), KeyboardInterrupt("broken")], ids=repr
)
@pytest.mark.parametrize("method", ["training_step", "validation_step"])
def test_an_exception_in_the_task(method: str, error: BaseException) -> None:
    recorder, memory = Recorder(), MemoryTracker()
    task = FailsIn(method, error)
    with pytest.raises(type(error), match="broken") as caught:
        fit(task, ones(3), ones(3), accumulate=2, callbacks=recorder, trackers=memory)
    assert caught.value is error
    balanced(recorder)
    assert recorder.count("exception") == 1
    ends = ["batch_end", "epoch_end", "fit_end", "teardown"]
    if method == "validation_step":
        ends = ["validation_batch_end", "validation_end", *ends[1:]]
    assert recorder.log[-1 - len(ends) :] == ["exception", *ends]
    assert memory.runs[0].status == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert task.training
    assert task._trainer is None


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_exception_in_an_evaluation(stage: str) -> None:
    recorder, memory = Recorder(), MemoryTracker()
    name = {"validate": "validation"}.get(stage, stage)
    error = ValueError("broken")
    found = trainer(callbacks=recorder, trackers=memory)
    with pytest.raises(ValueError, match="broken") as caught:
        getattr(found, stage)(FailsIn(f"{name}_step", error), ones(3))
    assert caught.value is error
    assert recorder.log[-4:] == ["exception", f"{name}_batch_end", f"{name}_end", "teardown"]
    assert memory.runs[0].status == "failed"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_failing_end_of_a_batch_does_not_keep_it_from_the_others(stage: str) -> None:
    name = {"validate": "validation"}.get(stage, stage)
    last = Recorder()
    found = trainer(callbacks=[Recorder(fail={f"{name}_batch_end": ValueError("broken")}), last])
    with pytest.raises(ValueError, match="broken"):
        getattr(found, stage)(Scalar(), ones(3))
    assert last.count(f"{name}_batch_start") == last.count(f"{name}_batch_end") == 1


@pytest.mark.parametrize("place", ["data", "configure_optimizers", "train_dataloader", "count_samples", "writer"])
def test_an_exception_elsewhere(place: str) -> None:
    recorder = Recorder()

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("broken")

    def data() -> Any:
        yield from ones(2)
        fail()

    class Stream:
        def __iter__(self) -> Any:
            return data()

    task = Scalar()
    if place not in ("data", "writer"):
        task.__dict__[place] = fail
    found = trainer(callbacks=recorder)
    with pytest.raises(ValueError, match="broken"):
        if place == "writer":
            found.predict(task, ones(2), writer=fail)
        else:
            found.fit(task, {"data": Stream(), "train_dataloader": None}.get(place, ones(2)))
    balanced(recorder)
    assert recorder.count("exception") == recorder.count("teardown") == 1


def test_an_exception_in_the_record_of_an_epoch() -> None:
    def fail(trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        if "loss_epoch" in metrics:
            raise ValueError("broken")

    recorder = Recorder()
    with pytest.raises(ValueError, match="broken"):
        fit(Logged(), ones(2), callbacks=[recorder, Watch(log=fail)])
    assert recorder.log[-4:] == ["exception", "epoch_end", "fit_end", "teardown"]
    balanced(recorder)


def test_two_callbacks_fail() -> None:
    fail = {"batch_end": ValueError("the first"), "epoch_end": RuntimeError("the second")}
    a, b, c = Recorder(fail=fail), Recorder(fail={"batch_end": KeyError("another")}), Recorder()
    with pytest.raises(ValueError, match="the first") as caught:
        fit(Scalar(), ones(2), callbacks=[a, b, c])
    notes = "\n".join(caught.value.__notes__)
    assert "Recorder.on_batch_end failed as well: KeyError: 'another'" in notes
    assert "then on_epoch_end failed as well: RuntimeError: the second" in notes
    assert c.log == [
        "setup", "fit_start", "epoch_start",
        "batch_start", "before_backward", "backward", "before_step", "step", "batch_end",
        "exception", "epoch_end", "fit_end", "teardown",
    ]  # fmt: skip


def test_an_exception_in_on_exception_hides_nothing() -> None:
    failing = Recorder(fail={"exception": RuntimeError("in the clean-up")})
    other = Recorder()
    with pytest.raises(ValueError, match="broken") as caught:
        fit(FailsIn("training_step", ValueError("broken")), ones(2), callbacks=[failing, other])
    assert "then on_exception failed as well: RuntimeError: in the clean-up" in caught.value.__notes__
    assert other.count("exception") == other.count("teardown") == 1


def test_the_error_is_to_be_read_in_the_end_events() -> None:
    seen: list[Any] = []
    error = ValueError("broken")
    watch = Watch(
        exception=lambda trainer, task, raised: seen.append(raised),
        fit_end=lambda trainer, task: seen.append(trainer.error),
        teardown=lambda trainer, task: seen.append(trainer.error),
    )
    with pytest.raises(ValueError, match="broken"):
        fit(FailsIn("training_step", error), ones(2), callbacks=watch)
    assert seen == [error] * 3


# Control flow.


def raising(error: ControlFlow | type[ControlFlow], at: int) -> Any:
    """A handler that raises at its `at`-th call, counted from 0."""
    calls = iter(range(1000))

    def handler(*_: Any) -> None:
        if next(calls) == at:
            raise error

    return handler


class TestSkipBatch:
    @pytest.mark.parametrize("event", ["batch_start", "before_backward"])
    def test_a_batch_is_left_out(self, event: str) -> None:
        # Windows (1, 2), (3, 6); the second batch is skipped: 1 alone, then 4.5.
        recorder, task = Recorder(), Scalar()
        found = fit(
            task, batches(1, 2, 3, 6), accumulate=2, callbacks=[recorder, Watch(**{event: raising(SkipBatch(), 1)})]
        )
        assert task.value == -1 - 4.5
        assert (found.state.step, found.state.micro_step, found.state.batch) == (2, 4, 0)
        assert recorder.count("batch_end") == 4
        balanced(recorder)
        assert found.error is None

    @pytest.mark.parametrize("event", ["batch_start", "before_backward"])
    def test_a_window_of_nothing_else_is_skipped(self, event: str) -> None:
        recorder, task = Recorder(), Scalar()
        found = fit(task, batches(1, 2, 4), callbacks=[Watch(**{event: raising(SkipBatch(), 1)}), recorder])
        assert task.value == -5
        assert (found.state.step, found.state.skipped_steps) == (2, 1)
        assert recorder.count("before_step") == 2
        assert recorder.count("step") == 3

    def test_from_the_task(self) -> None:
        class Picky(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                if batch.item() == 2:
                    raise SkipBatch
                return super().training_step(batch, batch_idx)

        task = Picky()
        fit(task, batches(1, 2, 3, 6), accumulate=2)
        assert task.value == -5.5

    def test_with_exact_weights(self) -> None:
        class Pairs(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return (self.w * batch).sum(), len(batch)

        data = [torch.tensor([4.0]), torch.tensor([9.0, 9]), torch.tensor([1.0, 1, 1])]
        for event in ("batch_start", "before_backward"):
            task = Pairs()
            found = fit(task, data, accumulate=3, callbacks=Watch(**{event: raising(SkipBatch(), 1)}))
            assert task.value == pytest.approx(-7 / 4)
            assert found.state.tokens == 4

    def test_the_first_of_a_window_with_exact_weights(self) -> None:
        class Pairs(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return (self.w * batch).sum(), len(batch)

        task = Pairs()
        data = [torch.tensor([9.0, 9]), torch.tensor([4.0]), torch.tensor([1.0, 1, 1])]
        fit(task, data, accumulate=3, callbacks=Watch(before_backward=raising(SkipBatch(), 0)))
        assert task.value == pytest.approx(-7 / 4)

    def test_a_step_is_dropped(self) -> None:
        recorder, task = Recorder(), Scalar(momentum=0.5)
        found = fit(task, batches(1, 2, 4), callbacks=[Watch(before_step=raising(SkipBatch(), 1)), recorder])
        # 1, then 4 + 0.5 * 1: the gradient of 2 has left no trace, in the momentum neither.
        assert task.value == -1 - 4.5
        assert (found.state.step, found.state.skipped_steps) == (2, 1)
        assert recorder.count("step") == 3

    @pytest.mark.parametrize("event", ["backward", "step", "batch_end", "epoch_start", "validation_start", "log"])
    def test_too_late_or_elsewhere_is_an_error(self, event: str) -> None:
        recorder = Recorder()
        found = trainer(callbacks=[recorder, Watch(**{event: raising(SkipBatch(), 0)})], log_every=1)
        with pytest.raises(ConfigError, match=r"SkipBatch has no effect where it was raised\. Raise it in on_batch"):
            found.fit(Logged(), ones(2), ones(1))
        balanced(recorder)
        assert recorder.count("exception") == 1


class TestEndEpoch:
    @pytest.mark.parametrize(
        ("event", "steps"),
        [
            ("batch_start", 1),
            ("before_backward", 1),
            ("backward", 1),
            ("before_step", 1),
            ("step", 2),
            ("batch_end", 2),
        ],
    )
    def test_the_next_epoch_follows(self, event: str, steps: int) -> None:
        recorder, task = Recorder(), Scalar()
        found = fit(
            task, ones(3), ones(1), max_epochs=2, callbacks=[recorder, Watch(**{event: raising(EndEpoch(), 1)})]
        )
        assert task.value == -(steps + 3)
        assert (found.state.step, found.state.epoch) == (steps + 3, 2)
        assert recorder.count("epoch_end") == 2
        assert recorder.count("validation_end") == 2
        balanced(recorder)
        assert found.error is None

    def test_an_open_window_is_dropped(self) -> None:
        # The first window (1 and 2 of 3 batches) is left open when the epoch ends at its second batch.
        task = Scalar()
        found = fit(
            task, batches(1, 2, 4), max_epochs=2, accumulate=3, callbacks=Watch(batch_end=raising(EndEpoch(), 1))
        )
        assert task.value == pytest.approx(-7 / 3)
        assert (found.state.step, found.state.epoch) == (1, 2)

    def test_an_open_window_that_would_be_carried_is_dropped(self) -> None:
        # Windows of 2 over epochs of 3: the third batch of the first epoch would be carried, but is dropped.
        task = Scalar()
        fit(
            task, batches(1, 2, 4), max_epochs=2, accumulate=2, accumulate_across_epochs="carry",
            callbacks=Watch(batch_end=raising(EndEpoch(), 2)),
        )  # fmt: skip
        assert task.value == pytest.approx(-1.5 - 1.5 - 4)

    @pytest.mark.parametrize("event", ["validation_start", "validation_batch_end", "validation_end", "log"])
    def test_in_validation_and_its_record_it_is_an_error(self, event: str) -> None:
        recorder = Recorder()
        found = trainer(
            callbacks=[recorder, Watch(**{event: raising(EndEpoch(), 0)})], val_every="2 steps", log_every=1
        )
        with pytest.raises(ConfigError, match=r"EndEpoch has no effect where it was raised\."):
            found.fit(Logged(), ones(4), ones(1))
        balanced(recorder)

    @pytest.mark.parametrize("event", ["batch_start", "before_backward", "backward"])
    def test_in_the_first_batch_of_all(self, event: str) -> None:
        found = fit(Scalar(), ones(3), max_epochs=2, callbacks=Watch(**{event: raising(EndEpoch(), 0)}))
        assert (found.state.step, found.state.epoch) == (3, 2)

    def test_from_the_task(self) -> None:
        class Short(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                if batch_idx == 2:
                    raise EndEpoch
                return super().training_step(batch, batch_idx)

        task = Short()
        assert fit(task, ones(5), max_epochs=3).state.step == 6
        assert task.value == -6

    def test_the_mean_of_the_epoch_is_over_what_was_trained(self) -> None:
        seen: list[float] = []
        fit(
            Logged(), batches(1, 2, 9),
            callbacks=Watch(
                batch_end=raising(EndEpoch(), 1),
                epoch_end=lambda trainer, task, metrics: seen.append(metrics["loss_epoch"]),
            ),
        )  # fmt: skip
        assert seen == [1.5]

    @pytest.mark.parametrize("event", ["fit_start", "epoch_start", "epoch_end", "fit_end"])
    def test_elsewhere_is_an_error(self, event: str) -> None:
        recorder = Recorder()
        with pytest.raises(ConfigError, match=r"EndEpoch has no effect where it was raised\. Raise it in an"):
            fit(Scalar(), ones(2), callbacks=[recorder, Watch(**{event: raising(EndEpoch(), 0)})])
        balanced(recorder)
        assert recorder.count("exception") == 1


class TestStopRun:
    @pytest.mark.parametrize(
        ("event", "steps"),
        [
            ("epoch_start", 0), ("batch_start", 0), ("before_backward", 0), ("backward", 0), ("before_step", 0),
            ("step", 1), ("batch_end", 1), ("log", 1),
        ],
    )  # fmt: skip
    def test_the_run_ends_in_order(self, event: str, steps: int) -> None:
        recorder, task, memory = Recorder(), Logged(), MemoryTracker()
        found = fit(
            task, ones(3), max_epochs=2, log_every=1, trackers=memory,
            callbacks=[recorder, Watch(**{event: raising(StopRun("enough"), 0)})],
        )  # fmt: skip
        assert task.value == -steps
        assert (found.state.step, found.state.epoch) == (steps, 0)
        assert found.stop_reason == "enough"
        assert found.error is None
        assert memory.runs[0].status == "success"
        balanced(recorder)
        assert recorder.count("exception") == 0
        assert recorder.count("epoch_start") == recorder.count("fit_end") == 1

    def test_in_validation(self) -> None:
        recorder = Recorder()
        found = fit(
            Scalar(), ones(3), ones(2), max_epochs=5, val_every="2 steps",
            callbacks=[recorder, Watch(validation_batch_end=raising(StopRun(), 0))],
        )  # fmt: skip
        assert found.state.step == 2
        assert found.stop_reason == "StopRun was raised"
        balanced(recorder)

    @pytest.mark.parametrize("event", ["epoch_end", "validation_end"])
    def test_at_the_end_of_an_epoch(self, event: str) -> None:
        recorder = Recorder()
        found = fit(
            Scalar(), ones(3), ones(1), max_epochs=5, callbacks=[recorder, Watch(**{event: raising(StopRun(), 1)})]
        )
        # Two whole epochs, and so the counters say.
        assert (found.state.step, found.state.epoch, found.state.batch) == (6, 2, 0)
        assert found.state.epochs_done == 2
        balanced(recorder)

    def test_at_the_start_of_fit(self) -> None:
        recorder = Recorder()
        found = fit(Scalar(), ones(3), callbacks=[recorder, Watch(fit_start=raising(StopRun("no"), 0))])
        assert (found.state.step, found.stop_reason) == (0, "no")
        assert recorder.log == ["setup", "fit_start", "fit_end", "teardown"]

    def test_an_open_window_is_dropped(self) -> None:
        task = Scalar()
        found = fit(task, ones(4), accumulate=2, callbacks=Watch(batch_end=raising(StopRun(), 2)))
        assert (task.value, found.state.step, task.w.grad) == (-1, 1, None)

    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    @pytest.mark.parametrize("error", [StopRun, EndEpoch, SkipBatch])
    def test_outside_of_training_is_an_error(self, stage: str, error: type[ControlFlow]) -> None:
        name = {"validate": "validation"}.get(stage, stage)
        recorder = Recorder()
        found = trainer(callbacks=[recorder, Watch(**{f"{name}_batch_start": raising(error, 0)})])
        with pytest.raises(ConfigError, match=f"{error.__name__} has no effect where it was raised"):
            getattr(found, stage)(Scalar(), ones(2))
        assert recorder.count("exception") == recorder.count("teardown") == 1


def test_control_flow_reaches_every_callback_of_an_end_event() -> None:
    log: list[str] = []
    found = fit(
        Scalar(), ones(3),
        callbacks=[Watch(batch_end=raising(StopRun("first"), 0)), Watch(batch_end=lambda *_: log.append("seen"))],
    )  # fmt: skip
    assert log == ["seen"]
    assert found.stop_reason == "first"


def test_an_error_beats_control_flow() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fit(Scalar(), ones(3), callbacks=[Watch(batch_end=raising(StopRun(), 0)), Watch(batch_end=fail)])


def test_events_of_a_task_are_bound_anew_for_each_run() -> None:
    found = trainer()
    log: list[str] = []

    class Talks(Scalar, Callback):
        def on_fit_end(self, trainer: Any, task: Task) -> None:
            log.append("end")

    found.fit(Talks(), ones(1))
    found.fit(Scalar(), ones(1))
    assert log == ["end"]
