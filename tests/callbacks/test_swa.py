"""`SWA`: which weights are averaged, the rate, and the statistics of batch norms."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import SkipBatch
from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.callbacks.swa import SWA
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.random import get_random_state
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from ..trainer.tiny import Recorder, Watch, fit, ones
from .rising import Rising

Run = Callable[..., list[Any]]


class Normed(Task):
    """A batch norm with dropout behind it, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.fixed = nn.BatchNorm1d(2).eval()
        self.fails = False

    def forward(self, batch: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.linear(batch)), 0.5, self.training)
        result: Tensor = self.fixed(hidden)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and not torch.is_grad_enabled() and batch_idx == 1:
            raise OSError("no second pass")
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def numbers(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 2, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "seen", "last"),
    [
        ({"start": 0.5}, [2.0, 4.0, 6.0, 7.0], 7.0),  # the ends of epochs 3 and 4
        ({"start": "2 epochs"}, [2.0, 4.0, 6.0, 7.0], 7.0),
        ({"start": 2}, [2.0, 4.0, 6.0, 7.0], 7.0),
        ({"start": "5 steps", "every": 1}, [2.0, 4.0, 6.0, 7.0], 7.0),
        ({"start": 0, "every": "2 epochs"}, [2.0, 4.0, 4.0, 6.0], 6.0),
        ({"start": 0.5, "evaluates": False}, [2.0, 4.0, 6.0, 8.0], 7.0),
    ],
)
def test_which_weights_are_averaged(options: dict[str, Any], seen: list[float], last: float) -> None:
    task = Rising()
    fit(task, ones(2), ones(1), max_epochs=4, callbacks=SWA(**options))
    assert task.seen == seen
    assert task.value == last


def test_the_same_as_torch() -> None:
    data = numbers(3)
    task = Normed()
    reference = AveragedModel(copy.deepcopy(task))

    def keep(trainer: Any, task: Any, metrics: Any) -> None:
        if trainer.state.epoch >= 2:
            reference.update_parameters(task)

    fit(task, data, max_epochs=5, callbacks=[SWA("2 epochs"), Watch(epoch_end=keep)])
    assert int(reference.n_averaged) == 3
    for name, wanted in reference.module.named_parameters():
        torch.testing.assert_close(task.get_parameter(name), wanted, rtol=1e-6, atol=1e-7)
    hidden = [task.linear(batch).detach() for batch in data]
    torch.testing.assert_close(task.norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(task.norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))


def test_the_pass_for_statistics_leaves_no_trace() -> None:
    recorder, tracker, kept = Recorder(), MemoryTracker(), []
    task = Normed()
    fixed = copy.deepcopy(task.fixed.state_dict())
    passes = 0

    class Data:
        def __iter__(self) -> Iterator[Tensor]:
            nonlocal passes
            passes += 1
            yield from numbers(3)

    class Twice(Watch):
        after = ("SWA",)

    watch = Watch(fit_end=lambda trainer, task: kept.append(get_random_state(trainer.device)))
    last = Twice(teardown=lambda trainer, task: kept.append(get_random_state(trainer.device)))
    optimizer_state: dict[str, Any] = {}

    def note(trainer: Any, task: Any) -> None:
        optimizer_state.update(copy.deepcopy(trainer.optimizers[0].state_dict()))

    found = fit(
        task, Data(), numbers(1), max_epochs=2, trackers=tracker, log_every=1,
        callbacks=[SWA(0.0), recorder, watch, last, Watch(fit_end=note)],
    )  # fmt: skip
    assert passes == 3
    assert [recorder.count(event) for event in ("batch_start", "before_step", "step", "batch_end")] == [6, 6, 6, 6]
    assert len([step for step, values in tracker.runs[0].records if "loss" in values]) == 6
    assert torch.equal(kept[0].torch_cpu, kept[1].torch_cpu)
    assert kept[0].python == kept[1].python
    assert (task.norm.momentum, int(task.norm.num_batches_tracked)) == (0.1, 3)
    assert (task.training, task.norm.training, task.fixed.training) == (True, True, False)
    assert all(torch.equal(value, fixed[name]) for name, value in task.fixed.state_dict().items() if "running" in name)
    assert (found.state.step, found.state.micro_step) == (6, 6)
    now = found.optimizers[0].state_dict()["state"]
    assert all(torch.equal(now[key]["exp_avg"], value["exp_avg"]) for key, value in optimizer_state["state"].items())
    assert "log" not in vars(task)


def test_a_batch_that_the_task_skips_counts_for_nothing() -> None:
    class Skipping(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise SkipBatch
            return super().training_step(batch, batch_idx)

    task = Skipping()
    fit(task, numbers(3), callbacks=SWA(0.0))
    assert int(task.norm.num_batches_tracked) == 2


def test_statistics_may_be_left_averaged() -> None:
    task = Normed()
    swa = SWA(0.0, recompute_statistics=False)
    fit(task, numbers(3), max_epochs=2, callbacks=swa)
    assert torch.equal(task.norm.running_mean, swa.averages["norm.running_mean"])


def test_manual_optimization_can_not_recompute() -> None:
    class Manual(Normed):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self(batch).square().mean())
            self.optimizers().step()
            self.optimizers().zero_grad()

    with pytest.raises(ConfigError, match=r"in manual optimization would step the optimizers. Give it recompute_stati"):
        fit(Manual(), numbers(2), callbacks=SWA(0.0))
    fit(Manual(), numbers(2), callbacks=SWA(0.0, recompute_statistics=False))


def test_a_failing_pass_leaves_the_training_weights() -> None:
    kept: list[dict[str, Tensor]] = []

    def keep(trainer: Any, task: Any) -> None:
        kept.append({name: value.clone() for name, value in task.state_dict().items()})

    task = Normed()
    task.fails = True
    with pytest.raises(OSError, match="no second pass") as raised:
        fit(task, numbers(3), max_epochs=2, callbacks=[SWA(0.0), Watch(fit_end=keep)])
    assert "SWA(recompute_statistics=False) leaves this out" in "".join(raised.value.__notes__)
    assert [name for name, value in task.state_dict().items() if not torch.equal(value, kept[0][name])] == []
    assert (task.norm.momentum, "log" in vars(task)) == (0.1, False)


def test_data_that_comes_once_leaves_averaged_statistics() -> None:
    task, swa = Normed(), SWA(0.0)
    with pytest.warns(UserWarning, match="the training data gave no batch a second time. Pass an iterable that"):
        fit(task, iter(numbers(3)), callbacks=swa)
    assert torch.equal(task.norm.running_mean, swa.averages["norm.running_mean"])
    assert int(task.norm.num_batches_tracked) == 3


def test_nothing_averaged_is_said() -> None:
    task = Rising()
    with pytest.warns(UserWarning, match="SWA averaged nothing in 3 steps: the task keeps its training weights. No po"):
        fit(task, ones(5), max_steps=3, callbacks=SWA(0.5))
    assert task.value == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(task, ones(5), fast_dev_run=True, callbacks=SWA(0.5))


# The rate.


class Rates(Rising):
    """Notes the rate of each step; its schedule halves it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), "interval": "step"}}


def rates(task: Task, **options: Any) -> list[float]:
    found: list[float] = []
    watch = Watch(step=lambda trainer, task, outcome: found.append(trainer.optimizers[0].param_groups[0]["lr"]))
    fit(task, ones(2), max_epochs=4, callbacks=[SWA(0.5, **options), watch])
    return found


@pytest.mark.parametrize("make", [lambda o: ExponentialLR(o, 0.5), lambda o: LambdaLR(o, lambda step: 0.5**step)])
def test_its_rate_takes_the_place_of_the_schedules(make: Callable[[Any], Any]) -> None:
    before = [1.0, 0.5, 0.25, 0.125]
    assert rates(Rates(make), lr=0.25) == [*before, *[0.25] * 4]
    first, last = 0.0625, 0.25  # the schedule had moved on at the step before
    found = rates(Rates(make), lr=last, anneal="3 steps")
    cosines = [(1 + math.cos(math.pi * t)) / 2 for t in (0, 1 / 3, 2 / 3, 1)]
    assert found[:4] == before
    assert found[4:] == pytest.approx([last + (first - last) * each for each in cosines])
    assert rates(Rates(make)) == [0.5**step for step in range(8)]


def test_records_show_its_rate() -> None:
    tracker = MemoryTracker()
    fit(
        Rising(), ones(2), max_epochs=2, trackers=tracker, log_every=1,
        callbacks=[LearningRateMonitor(), SWA(0.5, lr=0.25)],
    )  # fmt: skip
    shown = {step: values["lr"] for step, values in tracker.runs[0].records if "lr" in values}
    assert shown == {1: 1.0, 2: 0.25, 3: 0.25, 4: 0.25}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SWA(1.5), r"SWA\(start=1.5\). Expected a fraction of the run below 1, epochs, or a text as"),
        (lambda: SWA(-0.5), r"SWA\(start=-0.5\)"),
        (lambda: SWA(True), r"SWA\(start\)=True"),
        (lambda: SWA(every="1M tokens"), r"SWA\(every\)='1M tokens'"),
        (lambda: SWA(lr=-1.0), r"SWA\(lr=-1.0\)"),
        (lambda: SWA(anneal=2), r"SWA\(anneal=2\) has no rate to lead to. Give it by lr=."),
        (lambda: SWA(recompute_statistics=1), r"SWA\(recompute_statistics=1\)"),
    ],
)
def test_arguments(make: Callable[[], SWA], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# Several processes.


def _statistics() -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    task = Normed()
    data = torch.cat(numbers(4))
    # The rate is 0, so that one process and two have the same weights; batches of 2 are dealt in turn.
    fit(task, DataLoader(TensorDataset(data), batch_size=2, collate_fn=_rows), callbacks=SWA(0.0, lr=0.0))
    return [task.norm.running_mean, task.norm.running_var], int(task.norm.num_batches_tracked)  # type: ignore[list-item]


def _rows(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row for (row,) in samples])


def test_two_processes_compute_the_statistics_of_one(two_processes: Run) -> None:
    (first, count), (second, _) = two_processes(_statistics)
    wanted, alone = _statistics()
    assert count == alone == 8
    for mine, theirs, exact in zip(first, second, wanted, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, exact)
