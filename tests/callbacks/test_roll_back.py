"""`RollBack` against runs that have never seen the samples that it leaves out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.roll_back import RollBack
from loopwright.distributed.errors import ConfigError, NonFiniteError
from loopwright.distributed.group import rank
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]


class Net(Task):
    """With what has a state: dropout, batch norm, Adam, a schedule, and a mean over the epoch."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LeaveOut(Callback):
    """Never sees these batches."""

    def __init__(self, batches: Sequence[int]) -> None:
        self.batches = set(batches)

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.state.epoch == 0 and batch_idx in self.batches:
            raise SkipBatch


def batches(count: int, bad: Sequence[int], value: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(6, 5, generator=generator) for _ in range(count)]
    for index in bad:
        made[index][0, 0] = value
    return made


def fit(callbacks: list[Callback], data: Any, *, lr: float = 0.01, **options: Any) -> tuple[Trainer, Net]:
    options = {"max_epochs": 1, "seed": 3, "trackers": False, "progress": False, **options}
    trainer = Trainer(callbacks=callbacks, **options)
    task = Net(lr)
    trainer.fit(task, data)
    return trainer, task


def assert_equal(one: tuple[Trainer, Net], other: tuple[Trainer, Net]) -> None:
    """Bit for bit: weights and buffers, the optimizer, the schedule, the epoch's mean, the random numbers to come."""
    for name, value in one[1].state_dict().items():
        torch.testing.assert_close(value, other[1].state_dict()[name], rtol=0, atol=0)
    own, others = (trainer.optimizers[0].state_dict() for trainer, _ in (one, other))
    assert own["param_groups"] == others["param_groups"]
    for index, state in own["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, others["state"][index][name], rtol=0, atol=0)
    assert one[0].metrics["loss"] == other[0].metrics["loss"]
    assert one[0].state.step == other[0].state.step


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_run_is_the_one_that_never_saw_the_samples(value: float) -> None:
    data = batches(20, [11], value)
    guard = RollBack(every=2, snapshot_every=4)
    with pytest.warns(UserWarning, match=r"RollBack: at step 12 .*Back to step 8; batches 8 to 11 of epoch 0 are left"):
        rolled = fit([guard], data)
    assert_equal(rolled, fit([LeaveOut(range(8, 12))], data))
    assert (rolled[0].state.step, rolled[0].state.samples) == (16, 16 * 6)
    (entry,) = guard.skipped
    assert (entry["epoch"], entry["batches"], entry["samples"]) == (0, [8, 11], [48, 71])


def test_a_spike_is_judged_by_the_losses_before_it() -> None:
    data = batches(40, [], 0.0)
    data[25][0, 4] = 60.0  # a target
    guard = RollBack(every=1, snapshot_every=5, sigmas=6.0, history=20)
    with pytest.warns(UserWarning, match=r"at step 26 the loss is .*, and was .* with a standard deviation of"):
        rolled = fit([guard], data)
    assert guard.skipped[0]["batches"] == [25, 25]
    assert_equal(rolled, fit([LeaveOut([25])], data))


def test_without_a_spread_only_what_is_not_finite_counts() -> None:
    data = batches(40, [], 0.0)
    data[25][0, 4] = 60.0
    guard = RollBack(every=1, snapshot_every=5, sigmas=None)
    fit([guard], data)
    assert guard.skipped == []


def test_accumulation_and_the_averages_of_ema_go_back_as_well() -> None:
    data = batches(24, [13], math.nan)
    guard, ema, expected = RollBack(every=1, snapshot_every=2), EMA(0.8), EMA(0.8)
    with pytest.warns(UserWarning, match="Back to step 6; batches 12 to 13"):
        rolled = fit([guard, ema], data, accumulate=2)
    assert_equal(rolled, fit([LeaveOut([12, 13]), expected], data, accumulate=2))
    assert ema.num_averaged == expected.num_averaged == 11
    for name, value in ema.averages.items():
        torch.testing.assert_close(value, expected.averages[name], rtol=0, atol=0)


class Counted(Net):
    """Has state that is no tensor, which it changes in place."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.seen = {"steps": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["steps"] += 1
        return super().training_step(batch, batch_idx)


def test_state_that_is_no_tensor_goes_back_each_time() -> None:
    task = Counted()
    trainer = Trainer(
        callbacks=[RollBack(every=1, snapshot_every=4)], max_epochs=1, seed=3, trackers=False, progress=False
    )
    with pytest.warns(UserWarning, match="Back to step 4"):
        trainer.fit(task, batches(12, [5, 6], math.nan))
    assert task.seen == {"steps": 9}  # of 12, the two that the first way back left out and the one of the second


def test_it_goes_back_twice_to_one_snapshot() -> None:
    data = batches(20, [5, 6], math.nan)
    guard = RollBack(every=1, snapshot_every=4)
    with pytest.warns(UserWarning, match="Back to step 4"):
        rolled = fit([guard], data)
    assert [entry["batches"] for entry in guard.skipped] == [[4, 5], [6, 6]]
    assert_equal(rolled, fit([LeaveOut([4, 5, 6])], data))


def test_a_second_epoch_begins_with_a_snapshot_of_its_own() -> None:
    data = batches(6, [], 0.0)

    class Breaks(Callback):
        """The first batch of the second epoch has a NaN."""

        def on_batch_start(self, trainer: Any, task: Any, batch: Tensor, batch_idx: int) -> None:
            if trainer.state.epoch == 1 and batch_idx == 0:
                batch[0, 0] = math.nan

    guard = RollBack(every=1, snapshot_every=100)
    with pytest.warns(UserWarning, match="at step 7 the loss is nan. Back to step 6; batches 0 to 0 of epoch 1"):
        trainer, task = fit([Breaks(), guard], data, max_epochs=2)
    assert trainer.state.step == 11
    assert all(value.isfinite().all() for value in task.parameters())


def test_too_many_times_is_an_error() -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(NonFiniteError, match=r"has gone back 2 times before; max_times=2\. Lower the learning rate"),
    ):
        warnings.simplefilter("ignore")
        fit([RollBack(every=1, snapshot_every=1, max_times=2)], batches(20, [3, 5, 7], math.nan))


def test_what_was_left_out_is_in_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    data = batches(20, [5, 15], math.nan)

    def train(max_steps: int, **options: Any) -> tuple[Trainer, Net, RollBack]:
        guard = RollBack(every=1, snapshot_every=2)
        keep = ModelCheckpoint(every="1 step", last=True)
        trainer = Trainer(
            callbacks=[guard, keep], max_steps=max_steps, seed=3, trackers=False, progress=False, project_dir=tmp_path,
            name="run",
        )  # fmt: skip
        task = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(task, data, **options)
        return trainer, task, guard

    train(10)
    trainer, task, guard = train(16, resume_from="latest")
    assert [entry["samples"] for entry in guard.skipped] == [[24, 35], [84, 95]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit([RollBack(every=1, snapshot_every=2)], data, max_steps=16)
    assert trainer.state.step == whole[0].state.step == 16
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, whole[1].state_dict()[name], rtol=0, atol=0)


def on_two(strategy: str, bad: int, every: int) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """Process 1 has a NaN in its batch of one step; all go back."""
    torch.manual_seed(rank())
    data = batches(16, [], 0.0)

    class Breaks(Callback):
        def on_batch_start(self, trainer: Any, task: Any, batch: Tensor, batch_idx: int) -> None:
            if rank() == 1 and batch_idx == bad:
                batch[0, 0] = math.nan

    guard = RollBack(every=every, snapshot_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rolled = fit([Breaks(), guard], data, strategy=strategy)
        expected = fit([LeaveOut([4, 5])], data, strategy=strategy)
    own, others = (trainer.strategy.whole_model_state(trainer.model) for trainer, _ in (rolled, expected))
    return guard.skipped, own, others


@pytest.mark.parametrize(("strategy", "bad", "every"), [("ddp", 5, 1), ("ddp", 4, 2), ("fsdp", 5, 1)])
def test_all_processes_go_back_where_one_has_to(two_processes: Run, strategy: str, bad: int, every: int) -> None:
    """Where a look comes a step after the NaN, the losses of all are NaN by then, and the first one is named."""
    results = two_processes(on_two, strategy, bad, every, timeout=120)
    for skipped, own, others in results:
        assert [entry["batches"] for entry in skipped] == [[4, 5]]
        assert skipped[0]["reason"] == "process 1: the loss is nan"
        assert own.keys() == others.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, others[name], rtol=0, atol=0)
    assert results[0][1]


def test_a_task_that_steps_by_itself_is_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    trainer = Trainer(callbacks=[RollBack()], max_epochs=1, trackers=False, progress=False)
    with pytest.raises(ConfigError, match=r"automatic_optimization = False .* Leave RollBack out"):
        trainer.fit(Manual(), batches(2, [], 0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 10, "snapshot_every": 15}, r"Expected a multiple, such as snapshot_every=10"),
        ({"sigmas": 0}, r"RollBack\(sigmas=0\)"),
        ({"history": 3}, r"RollBack\(history=3\)"),
        ({"max_times": 0}, r"RollBack\(max_times=0\)"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RollBack(**options)
