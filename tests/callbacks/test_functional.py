"""`trainer.on`: plain functions with filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.callbacks.callback import SkipBatch
from loopwright.distributed.errors import ConfigError

from ..trainer.tiny import Recorder, Scalar, Watch, batches, fit, ones, trainer


def fired(event: str, *, train: int = 6, options: dict[str, Any] | None = None, **filters: Any) -> list[int]:
    """At which micro-steps a function was called."""
    seen: list[int] = []
    found = trainer(**{"accumulate": 2, "max_epochs": 2, **(options or {})})
    found.on(event, lambda trainer, task, *values: seen.append(trainer.state.micro_step), **filters)
    found.fit(Scalar(), ones(train), ones(1))
    return seen


@pytest.mark.parametrize(
    ("event", "filters", "expected"),
    [
        # 2 epochs of 6 batches, windows of 2: steps 1 to 6. A step fires before its micro-step is counted.
        ("step", {}, [1, 3, 5, 7, 9, 11]),
        ("step", {"every": 2}, [3, 7, 11]),
        ("step", {"every": 4}, [7]),
        ("step", {"once": 3}, [5]),
        ("step", {"once": True}, [1]),
        ("step", {"once": False}, [1, 3, 5, 7, 9, 11]),
        ("step", {"before": 3}, [1, 3]),
        ("step", {"after": 4}, [9, 11]),
        ("step", {"after": 1, "before": 5, "every": 2}, [3, 7]),
        ("step", {"every": "3 steps"}, [5, 11]),
        ("step", {"every": "first"}, [1]),
        ("step", {"every": ["first", "4 steps", "5 batches"]}, [1, 5, 7, 11]),
        ("batch_start", {"every": 4}, [3, 7, 11]),
        ("batch_end", {"every": 4}, [4, 8, 12]),
        ("batch_end", {"once": 5}, [5]),
        ("batch_end", {"every": "5 batches"}, [5, 10]),
        ("batch_end", {"every": "0.5 epoch"}, [3, 6, 9, 12]),
        ("before_backward", {"every": 4}, [3, 7, 11]),
        ("backward", {"every": 4}, [3, 7, 11]),
        ("before_step", {"every": 2}, [3, 7, 11]),
        ("epoch_start", {"once": 2}, [6]),
        ("epoch_end", {"every": 2}, [12]),
        ("epoch_end", {"before": 2}, [6]),
        ("validation_end", {}, [6, 12]),
        ("validation_end", {"every": 2}, [12]),
        ("validation_batch_end", {"once": 2}, [12]),
        ("fit_start", {"once": True}, [0]),
        ("log", {"every": 2}, [12]),
        ("on_step", {"once": 3}, [5]),
    ],
)
def test_filters(event: str, filters: dict[str, Any], expected: list[int]) -> None:
    assert fired(event, **filters) == expected


def test_a_predicate_sees_what_the_function_sees() -> None:
    seen: list[float] = []
    found = trainer()
    found.on(
        "batch_start", lambda trainer, task, batch, index: seen.append(batch.item()),
        when=lambda trainer, task, batch, index: batch.item() > 2,
    )  # fmt: skip
    found.fit(Scalar(), batches(1, 3, 2, 5))
    assert seen == [3, 5]


def test_a_predicate_is_asked_after_the_counts() -> None:
    asked: list[int] = []
    found = trainer()

    def when(trainer: Any, task: Any, outcome: Any) -> bool:
        asked.append(trainer.state.step)
        return True

    found.on("step", lambda *_: None, every=2, when=when)
    found.fit(Scalar(), ones(5))
    assert asked == [2, 4]


def test_a_function_gets_the_values_of_the_event() -> None:
    seen: list[Any] = []
    found = trainer()
    found.on("validation_end", lambda trainer, task, metrics: seen.append((trainer, type(task), metrics)))
    found.fit(Scalar(), ones(1), batches(3))
    assert seen == [(found, Scalar, {"val": 3})]


def test_as_a_decorator() -> None:
    seen: list[int] = []
    found = trainer()

    @found.on("step", every=2)
    def report(trainer: Any, task: Any, outcome: Any) -> None:
        seen.append(trainer.state.step)

    @found.on("fit_end")
    def end(trainer: Any, task: Any) -> None:
        seen.append(-1)

    assert report.__name__ == "report"
    found.fit(Scalar(), ones(4))
    assert seen == [2, 4, -1]


def test_functions_run_after_callbacks_in_their_own_order() -> None:
    log: list[str] = []
    found = trainer(callbacks=Watch(fit_end=lambda *_: log.append("callback")))
    found.on("fit_end", lambda *_: log.append("first"))
    found.on("fit_end", lambda *_: log.append("second"))
    found.fit(Scalar(), ones(1))
    assert log == ["callback", "first", "second"]


def test_counts_begin_anew_in_each_run() -> None:
    seen: list[int] = []
    found = trainer()
    found.on("validation_end", lambda trainer, task, metrics: seen.append(trainer.state.step), once=1)
    found.on("step", lambda trainer, task, outcome: seen.append(trainer.state.step * 10), every="2 steps")
    for _ in range(2):
        found.fit(Scalar(), ones(3), ones(1))
    assert seen == [20, 3, 20, 3]


def test_registered_while_a_run_goes_on() -> None:
    seen: list[int] = []

    class Late(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                self.trainer.on("batch_end", lambda trainer, task, outputs: seen.append(trainer.state.micro_step))
            return super().training_step(batch, batch_idx)

    fit(Late(), ones(5))
    assert seen == [3, 4, 5]


def test_it_may_steer_the_run() -> None:
    found = trainer()
    found.on("step", lambda trainer, task, outcome: trainer.stop("enough"), once=2)
    found.fit(Scalar(), ones(5))
    assert (found.state.step, found.stop_reason) == (2, "enough")

    def skip(*_: Any) -> None:
        raise SkipBatch

    task = Scalar()
    found = trainer()
    found.on("batch_start", skip, once=2)
    found.fit(task, batches(1, 2, 4))
    assert task.value == -5


def test_a_step_that_was_skipped_is_not_counted_twice() -> None:
    class Some(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch.item() == 0 else super().training_step(batch, batch_idx)

    for filters, expected in [
        ({"every": 2}, [2, 4]), ({"once": 2}, [2]), ({"every": "2 steps"}, [2, 4]), ({"before": 2}, [1]),
        ({"after": 3}, [4]), ({}, [0, 1, 2, 2, 2, 3, 4]),
    ]:  # fmt: skip
        seen: list[int] = []
        found = trainer()
        found.on("step", lambda trainer, task, outcome, seen=seen: seen.append(trainer.state.step), **filters)
        found.fit(Some(), batches(0, 1, 1, 0, 0, 1, 1))
        assert seen == expected, filters


def test_an_evaluation_has_functions_too() -> None:
    recorder, seen = Recorder(), []
    found = trainer(callbacks=recorder)
    found.on("test_batch_end", lambda trainer, task, outputs: seen.append(1), every=2)
    found.test(Scalar(), ones(5))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("event", "filters", "message"),
    [
        ("stepp", {}, r"event='stepp' is unknown. Did you mean 'on_step'"),
        ("on_train_start", {}, r"event='on_train_start' is unknown. Did you mean 'on_\w+'\? Accepted: on_backward"),
        ("step", {"evry": 2}, r"trainer.on\(..., evry=\) is unknown. Did you mean 'every'"),
        ("step", {"steers": 0}, r"trainer.on\(steers=0\). Expected True or False"),
        ("step", {"every": 0}, r"every=0 of trainer.on. Expected an integer >= 1; counts begin at 1"),
        ("step", {"once": 0}, r"once=0 of trainer.on"),
        ("step", {"before": -1}, r"before=-1 of trainer.on"),
        ("step", {"every": "2 stps"}, r"every='2 stps' has an unknown unit 'stps'"),
        ("step", {"every": "last"}, r"every='last' of trainer.on can't be known in advance. Use the event 'fit_end'"),
        ("step", {"every": 1.5}, r"every=1.5: 1.5 steps is not a whole number"),
        ("step", {"every": True}, r"every=True is no duration"),
        (5, {}, r"event=5 of trainer.on. Expected a name such as 'step'. Accepted: on_backward"),
        ("step", {"when": 5}, r"when=5 of trainer.on. Expected a function of the trainer, .* for counts use every="),
        ("step", {"before": "3 steps"}, r"before='3 steps' of trainer.on. Expected an integer >= 1"),
    ],
)
def test_wrong_ones(event: Any, filters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer().on(event, lambda *_: None, **filters)


def test_what_can_not_be_called() -> None:
    with pytest.raises(ConfigError, match=r"trainer.on\('step', 5\). Expected a function that is called with the trai"):
        trainer().on("step", 5)


def test_device_values_are_not_read_by_filters() -> None:
    """A filter counts on the host: nothing in it waits for a tensor."""
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    found = trainer()
    found.on("step", lambda *_: None, every=3, after=1, before=100)
    with Mode():
        found.fit(Scalar(), ones(6), None)
    assert "item" not in seen


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"once": True, "every": 7}, [7]),
        ({"once": True, "after": 5}, [6]),
        ({"once": True, "when": lambda trainer, task, outcome: trainer.state.step > 8}, [9]),
        ({"once": True, "every": "0.5 epoch"}, [6]),  # the batch of a step counts when it is done
        ({"once": 3}, [3]),
    ],
)
def test_once_is_the_first_time_that_the_others_let_pass(filters: Any, expected: list[int]) -> None:
    found, seen = trainer(max_epochs=2), []
    found.on("step", lambda trainer, task, outcome: seen.append(trainer.state.step), **filters)
    for _ in range(2):  # a second run begins anew
        seen.clear()
        found.fit(Scalar(), ones(10))
        assert seen == expected
