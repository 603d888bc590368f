"""`Timer`."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.bus import bind
from loopwright.callbacks.callback import Callback
from loopwright.callbacks.timer import Timer
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

STEP, EVALUATION = 0.02, 0.05  # seconds that a batch takes at least


class Slow(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(STEP)
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(EVALUATION)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(EVALUATION)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(1, 1)] * 2


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "sanity_val_batches": 0, **options}
    return Trainer(callbacks=callbacks, trackers=False, progress=False, **options)


def test_stages_are_measured_apart() -> None:
    timer = Timer()
    trainer, task = trainer_with(timer), Slow()
    began = time.monotonic()
    trainer.fit(task, BATCHES, BATCHES)
    taken = time.monotonic() - began
    assert timer.time_elapsed("train") >= 2 * STEP
    assert timer.time_elapsed("validation") >= 2 * EVALUATION
    assert timer.time_elapsed("train") + timer.time_elapsed("validation") == pytest.approx(
        timer.time_elapsed("fit"), abs=0.05
    )
    assert timer.time_elapsed("fit") <= taken
    assert timer.time_elapsed("test") == timer.time_elapsed("predict") == 0.0
    stopped = timer.time_elapsed("fit")

    trainer.test(task, BATCHES)
    trainer.predict(task, BATCHES)
    assert 2 * EVALUATION <= timer.time_elapsed("test") < taken + 1
    assert 2 * EVALUATION <= timer.time_elapsed("predict") < taken + 1
    assert timer.time_elapsed("fit") == stopped
    assert timer.time_remaining() is None


def test_a_validation_alone_is_no_training() -> None:
    timer = Timer()
    trainer_with(timer).validate(Slow(), BATCHES)
    assert timer.time_elapsed("validation") >= 2 * EVALUATION
    assert timer.time_elapsed("train") == timer.time_elapsed("fit") == 0.0


def test_the_limit_ends_the_run_in_order() -> None:
    class Ended(Callback):
        reason: str | None = None
        epochs = 0

        def on_epoch_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            self.epochs += 1

        def on_fit_end(self, trainer: Any, task: Any) -> None:
            self.reason = trainer.stop_reason

    ended = Ended()
    trainer = trainer_with(Timer(3.5 * STEP), ended, max_epochs=1000)
    trainer.fit(Slow(), BATCHES)
    assert 1 <= trainer.state.step <= 4  # the fourth step ends after 4 * STEP at the soonest
    assert ended.epochs >= 1
    assert ended.reason is not None
    assert re.match(r"Timer: the run has taken 0:00:0\d, its limit is 0\.07 seconds", ended.reason)


def test_a_limit_over_the_legs_of_a_run() -> None:
    first = Timer("1 h")
    first.load_state_dict({"seconds": {"fit": 3599.99, "train": 3000.0}})
    assert first.state_dict()["seconds"] == {
        "fit": 3599.99, "train": 3000.0, "validation": 0.0, "test": 0.0, "predict": 0.0,
    }  # fmt: skip
    assert first.time_remaining() == pytest.approx(0.01)
    trainer = trainer_with(first, max_epochs=1000)
    trainer.fit(Slow(), BATCHES)
    assert trainer.state.step == 1


def test_only_a_limit_costs_a_call_per_step() -> None:
    assert bind([Timer()], [], None, None)[Callback.on_step] is None
    assert bind([Timer("1 h")], [], None, None)[Callback.on_step] is not None


def test_measures_after_an_exception_too() -> None:
    class Broken(Slow):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise ValueError("broken")

    timer = Timer()
    with pytest.raises(ValueError, match="broken"):
        trainer_with(timer).fit(Broken(), BATCHES, BATCHES)
    stopped = timer.time_elapsed("fit")
    assert stopped >= 2 * STEP
    assert timer.time_elapsed("fit") == stopped


def test_a_limit_that_is_no_time() -> None:
    with pytest.raises(
        ConfigError, match=r"Timer\(duration='5 steps'\) counts steps\. Expected a time such as '30 min'"
    ):
        Timer("5 steps")


def test_an_unknown_stage() -> None:
    with pytest.raises(
        ConfigError, match=r"stage='val' is unknown\. .*Accepted: fit, predict, test, train, validation"
    ):
        Timer().time_elapsed("val")
