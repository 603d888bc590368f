"""Pain 26: exceptions, and what is put in order after them."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from torch import Tensor

from loopwright.callbacks.callback import Callback
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from ..trainer.tiny import Recorder, Scalar, ones, trainer

ERRORS = [ValueError("broken"), StopIteration("broken"), KeyboardInterrupt("broken")]
PLACES = ["training_step", "validation_step", "training callback", "validation callback"]


class Raises(Callback):
    """Raises at the second batch of training or of validation."""

    def __init__(self, event: str, error: BaseException) -> None:
        self.event, self.error = event, error

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if self.event == "training" and batch_idx == 1:
            raise self.error

    def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if self.event == "validation" and batch_idx == 1:
            raise self.error


class Failing(Scalar):
    def __init__(self, step: str, error: BaseException) -> None:
        super().__init__()
        self.step, self.error = step, error

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.step == "training_step" and batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.step == "validation_step" and batch_idx == 1:
            raise self.error


class BrokenCleanUp(Callback):
    """Its own clean-up fails as well."""

    def on_exception(self, trainer: Any, task: Any, error: BaseException) -> None:
        raise RuntimeError("in on_exception")

    def on_teardown(self, trainer: Any, task: Any) -> None:
        raise RuntimeError("in on_teardown")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clean_up_fails", [False, True])
def test_pain_26_the_same_exception_comes_out_and_everybody_cleans_up(
    place: str, error: BaseException, clean_up_fails: bool
) -> None:
    recorder, memory = Recorder(), MemoryTracker()
    task: Task = Failing(place, error)
    callbacks: list[Callback] = [Raises(place.split()[0], error)] if "callback" in place else []
    found = trainer(
        callbacks=[*([BrokenCleanUp()] if clean_up_fails else []), *callbacks, recorder], trackers=memory, max_epochs=3,
    )  # fmt: skip
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(type(error), match="broken") as caught:
        found.fit(task, ones(3), ones(3))
    assert caught.value is error
    assert recorder.count("exception") == recorder.count("teardown") == 1
    assert recorder.log.index("exception") < recorder.log.index("teardown") == len(recorder.log) - 1
    assert memory.runs[0].status == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    # The Trainer can be used again.
    again = Scalar()
    if not callbacks and not clean_up_fails:
        found.fit(again, ones(2))
        assert again.value == -6
    if hasattr(error, "__notes__"):
        del error.__notes__


def test_pain_26_a_run_that_ends_well_is_a_success() -> None:
    memory = MemoryTracker()
    trainer(trackers=memory).fit(Scalar(), ones(2))
    assert memory.runs[0].status == "success"
