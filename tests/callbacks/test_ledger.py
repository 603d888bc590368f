"""What callbacks cost: the ledger, `EventTimer`, and the shares of a training's time."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.event_timer import EventTimer
from loopwright.callbacks.progress import ProgressBar
from loopwright.callbacks.progress_work import format_shares
from loopwright.distributed.errors import ConfigError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

NAP = 0.02


class Napping(Task):
    """Takes at least so long for each part; sleeping longer than asked makes no check fail."""

    def __init__(self, forward: float = NAP) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.forward_seconds = forward

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(self.forward_seconds)
        loss = self.net(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(NAP)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Napper(Callback):
    """Sleeps after each step and before each backward, and at each batch of a validation."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        time.sleep(2 * NAP)

    def on_before_backward(self, trainer: Any, task: Any, loss: Tensor) -> None:
        time.sleep(NAP)

    def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        time.sleep(3 * NAP)


class Parent(Callback):
    """Fires an event of its own inside another one."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        trainer._run.record({"inner": 1.0})


class Child(Callback):
    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        time.sleep(5 * NAP)


BATCHES = [torch.ones(3, 2)] * 4


def fit(task: Task, *callbacks: Callback, **options: Any) -> tuple[Trainer, float]:
    """The trainer, and the seconds that `fit` took by another clock."""
    options = {"max_epochs": 1, "sanity_val_batches": 0, "trackers": False, "progress": False, **options}
    trainer = Trainer(callbacks=list(callbacks), **options)
    began = time.perf_counter()
    trainer.fit(task, BATCHES, BATCHES[:2])
    return trainer, time.perf_counter() - began


def test_each_moment_counts_in_one_part() -> None:
    trainer, wall = fit(Napping(), Napper(), accumulate=2)
    seconds = trainer.training_seconds
    assert seconds["forward"] >= 4 * NAP
    assert seconds["callbacks"] >= 2 * 2 * NAP + 4 * NAP + 2 * 3 * NAP
    assert seconds["validation"] >= 2 * NAP
    assert sum(seconds.values()) <= wall
    assert trainer.training_seconds == seconds  # it stands still once the training is over


def test_the_ledger_counts_calls_and_names_their_owner() -> None:
    trainer, _ = fit(Napping(), Napper(), accumulate=2)
    calls = {(cost.owner, cost.event): cost.calls for cost in trainer.callback_costs}
    assert calls == {
        ("Napper", "on_step"): 2, ("Napper", "on_before_backward"): 4, ("Napper", "on_validation_batch_end"): 2,
    }  # fmt: skip
    slowest = max(trainer.callback_costs, key=lambda cost: cost.longest)
    assert (slowest.event, slowest.longest >= 3 * NAP) == ("on_validation_batch_end", True)


def test_functions_are_called_by_their_own_names() -> None:
    def look(*_: object) -> None:
        """Its name alone stands in tables, without that of the test."""

    trainer = Trainer(max_epochs=1, trackers=False, progress=False)
    trainer.on("step", look)
    trainer.on("step", lambda *_: None)
    trainer.fit(Napping(0.0), BATCHES)
    look_at, nameless = [cost.owner for cost in trainer.callback_costs]
    assert look_at == "look"
    assert re.fullmatch(r"<lambda> \(test_ledger\.py:\d+\)", nameless)


def test_a_callback_inside_another_is_not_counted_twice() -> None:
    trainer, wall = fit(Napping(0.0), Parent(), Child(), log_every="never")
    costs = {cost.owner: cost for cost in trainer.callback_costs}
    naps = 4 * 5 * NAP
    assert costs["Child"].seconds >= naps
    assert costs["Parent"].longest >= 5 * NAP  # its call as a whole
    assert costs["Parent"].seconds + costs["Child"].seconds <= wall
    assert trainer.training_seconds["callbacks"] <= wall


def test_a_function_that_is_added_in_a_run_keeps_what_was_counted() -> None:
    class Adds(Callback):
        def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
            if trainer.state.step == 2:
                trainer.on("step", note)

    def note(trainer: Any, task: Any, outcome: Any) -> None:
        pass

    trainer, _ = fit(Napping(0.0), Adds())
    calls = {cost.owner.rpartition(".")[2]: cost.calls for cost in trainer.callback_costs}
    assert calls == {"Adds": 4, "note": 2}


def test_a_failing_callback_has_its_time_counted() -> None:
    class Fails(Callback):
        def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
            time.sleep(NAP)
            raise ValueError("no more")

    trainer = Trainer(callbacks=[Fails()], max_epochs=1, trackers=False, progress=False)
    with pytest.raises(ValueError, match="no more") as caught:
        trainer.fit(Napping(0.0), BATCHES)
    assert caught.value.__notes__ == ["raised by Fails in on_step, at step 1"]
    (cost,) = trainer.callback_costs
    assert (cost.calls, cost.seconds >= NAP) == (1, True)


def test_manual_optimization_counts_backward_apart_from_forward() -> None:
    class Manual(Napping):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            time.sleep(NAP)
            self.manual_backward(self.net(batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    trainer, wall = fit(Manual(), Napper())
    seconds = trainer.training_seconds
    assert seconds["forward"] >= 4 * NAP
    assert seconds["backward"] > 0
    assert sum(seconds.values()) <= wall


def test_trackers_are_counted_by_name() -> None:
    class Sleepy(MemoryTracker):
        def log(self, metrics: Any, step: int) -> None:
            time.sleep(NAP)
            super().log(metrics, step)

    trainer, wall = fit(Napping(0.0), trackers=[Sleepy(name="sleepy"), MemoryTracker()], log_every=1, val_every=None)
    assert trainer.tracker_seconds["sleepy"] >= 4 * NAP
    assert trainer.training_seconds["trackers"] >= 4 * NAP
    assert sum(trainer.training_seconds.values()) <= wall
    assert set(trainer.tracker_seconds) == {"sleepy", "memory"}


def test_event_timer_names_slow_calls_and_prints_a_table() -> None:
    stream = io.StringIO()
    with pytest.warns(UserWarning, match=r"Napper\.on_step took 0\.\d\d s in one call") as caught:
        fit(Napping(0.0), Napper(), EventTimer(slow_seconds=1.5 * NAP, stream=stream), val_every=None)
    assert len([each for each in caught if "Napper.on_step" in str(each.message)]) == 1
    header, first, *others = stream.getvalue().splitlines()
    assert header.split() == ["callback", "event", "calls", "total", "s", "mean", "ms", "longest", "ms", "share"]
    assert first.split()[:3] == ["Napper", "on_step", "4"]
    assert float(first.split()[3]) >= 4 * 2 * NAP
    assert [line.split()[:3] for line in others[:1]] == [["Napper", "on_before_backward", "4"]]


def test_the_bar_ends_with_the_shares() -> None:
    stream = io.StringIO()
    fit(Napping(), ProgressBar(stream=stream, times_after_seconds=0.0))
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("time: ")
    assert "forward" in last
    assert last.endswith("of 0:00:00")


def test_a_short_training_has_no_line_on_its_time() -> None:
    stream = io.StringIO()
    fit(Napping(0.0), ProgressBar(stream=stream))
    assert "time:" not in stream.getvalue()


def test_shares_are_whole_percents() -> None:
    seconds = {"data": 3.0, "forward": 50.0, "backward": 46.7, "step": 0.3}
    assert format_shares(seconds) == "data 3 %, forward 50 %, backward 47 % of 0:01:40"
    assert format_shares({"data": 0.0}) == "0:00:00"


class SlowTracker(MemoryTracker):
    def log(self, metrics: Any, step: int) -> None:
        time.sleep(5 * NAP)
        super().log(metrics, step)


def test_a_budget_leaves_out_records_of_steps_alone() -> None:
    tracker = SlowTracker()
    with pytest.warns(UserWarning, match=r"trackers have taken \d+\.\d % .* above overhead_budget=1\.00%"):
        fit(Napping(0.0), trackers=[tracker], log_every=1, overhead_budget="1%", val_every="1 epoch")
    records = [(step, set(metrics) - {"epoch"}) for step, metrics in tracker.runs[0].records]
    assert records[0] == (1, {"loss_step"})
    assert (2, {"loss_step"}) not in records
    assert (4, {"loss_epoch"}) in records


def test_a_budget_with_room_changes_nothing() -> None:
    tracker = MemoryTracker()
    fit(Napping(NAP), trackers=[tracker], log_every=1, overhead_budget=0.9)
    assert [step for step, metrics in tracker.runs[0].records if "loss_step" in metrics] == [1, 2, 3, 4]


def test_callbacks_over_the_budget_are_named() -> None:
    with pytest.warns(UserWarning, match=r"callbacks took .* above overhead_budget=2\.00%; the most expensive: Napper"):
        fit(Napping(0.0), Napper(), overhead_budget=0.02)


@pytest.mark.parametrize("value", ["2", "two%", "200%", 0, 1.5, True, "0%"])
def test_a_budget_is_a_share(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"overhead_budget=.*such as '2%' or 0\.02, or None"):
        Trainer(overhead_budget=value)
