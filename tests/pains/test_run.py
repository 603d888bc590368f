"""Pains 27, 28, 29 and 31: records, order, cost, and a second run."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import CallbackOrderError
from loopwright.trackers.memory import MemoryTracker

from ..trainer.tiny import Scalar, Watch, count_calls, fit, ones, trainer


class Logged(Scalar):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_epoch=True)
        return loss


def test_pain_27_one_axis_for_training_and_validation() -> None:
    memory = MemoryTracker()
    fit(
        Logged(), ones(6), ones(2), max_epochs=2, accumulate=2, log_every=1, val_every="2 steps", trackers=memory,
    )  # fmt: skip
    run = memory.runs[0]
    steps = [step for step, _ in run.records]
    assert steps == sorted(steps)
    assert [step for step, _ in run.series("train_step")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in run.series("val")] == [2, 4, 6]
    assert [step for step, _ in run.series("train_epoch")] == [3, 6]
    keys = [(name, step) for step, metrics in run.records for name in metrics if name != "epoch"]
    assert len(keys) == len(set(keys))
    finished = dict(run.series("epoch"))
    assert finished[3] == 1
    assert finished[6] == 2


class Provides(Callback):
    provides = ("m",)

    def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        metrics["m"] = 4.0


class Reads(Callback):
    needs = ("m",)
    seen: float | None = None

    def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.seen = metrics["m"]


class Saves(Callback):
    after = (Reads, Provides)
    saved: dict[str, float] | None = None

    def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.saved = dict(metrics)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_pain_28_any_order_gives_the_same_result(order: tuple[int, ...]) -> None:
    callbacks: list[Any] = [Provides(), Reads(), Saves()]
    ran: list[str] = []
    found = trainer(callbacks=[callbacks[index] for index in order])
    found.fit(Scalar(), ones(1), ones(1))
    assert callbacks[1].seen == 4
    assert callbacks[2].saved == {"val": 1, "m": 4}
    assert [type(callback) for callback in found.callbacks] == [Provides, Reads, Saves]
    assert ran == []
    plan = str(trainer(callbacks=[callbacks[index] for index in order]).plan(Scalar(), ones(1), ones(1)))
    assert plan.index("Provides") < plan.index("Reads") < plan.index("Saves")


def test_pain_28_a_missing_provider_and_a_cycle_are_errors_at_the_start() -> None:
    with pytest.raises(CallbackOrderError, match="Reads needs the metric 'm', which no callback provides"):
        trainer(callbacks=[Reads()])

    class Early(Provides):
        after = (Reads,)

    with pytest.raises(CallbackOrderError, match="these callbacks wait for one another"):
        trainer(callbacks=[Early(), Reads()])


class Idle(Callback):
    """Does nothing in any event of a step."""


class Empty(Callback):
    """Handles the events of a step, and does nothing in them."""

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None: ...

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None: ...


def test_pain_29_idle_callbacks_add_no_call() -> None:
    bare = count_calls(Scalar())
    assert count_calls(Scalar(), callbacks=[Idle() for _ in range(10)]) == bare
    # Two events of ten callbacks are twenty calls, and one for each event.
    assert count_calls(Scalar(), callbacks=[Empty() for _ in range(10)]) - bare <= 22


def test_pain_29_a_logged_scalar_costs_less_than_25_calls() -> None:
    class Five(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            for name in ("a", "b", "c", "d", "e"):
                self.log(name, loss, on_step=True, on_epoch=True)
            return loss

    assert (count_calls(Five()) - count_calls(Scalar())) / 5 < 25


def test_pain_29_no_synchronisation_between_records() -> None:
    read: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                read.append(name)
            return func(*args, **(kwargs or {}))

    at_steps: list[tuple[int, int]] = []
    watch = Watch(step=lambda trainer, task, outcome: at_steps.append((trainer.state.step, len(read))))
    with Mode():
        fit(Logged(), ones(25), log_every="10 steps", clip_norm=1.0, callbacks=watch)
    # The records after steps 10 and 20 read once each; nothing else does.
    assert at_steps == [(step, (step > 10) + (step > 20)) for step in range(1, 26)]


def test_pain_31_a_second_fit_trains_again() -> None:
    task, found = Scalar(), trainer(max_epochs=2)
    for total in (-6, -12, -18):
        found.fit(task, ones(3))
        assert (task.value, found.state.step, found.state.epoch) == (total, 6, 2)


def test_pain_31_also_by_steps_and_after_a_failure() -> None:
    found = trainer(max_steps=4, max_epochs=100)
    for _ in range(2):
        found.fit(task := Scalar(), ones(3))
        assert task.value == -4

    class Breaks(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        found.fit(Breaks(), ones(3))
    found.fit(task := Scalar(), ones(3))
    assert (task.value, found.error) == (-4, None)
    assert torch.is_grad_enabled()
