"""`LearningRateMonitor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer


class Tiny(Task):
    def __init__(self, optimizers: Callable[[nn.Module], Any], automatic: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(1, 1)
        self.automatic_optimization = automatic
        self._make = optimizers

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.second(self.first(batch)).mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", 1.0)

    def configure_optimizers(self) -> Any:
        return self._make(self)


class Records(Callback):
    """Keeps what goes to the trackers."""

    def __init__(self) -> None:
        self.all: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        self.all.append((step, dict(metrics)))

    def values(self, *prefixes: str) -> list[dict[str, float]]:
        kept = [{k: v for k, v in metrics.items() if k.startswith(prefixes)} for _, metrics in self.all]
        return [metrics for metrics in kept if metrics]


def fit(task: Tiny, monitor: LearningRateMonitor, *extra: Callback, batches: int = 2, **options: Any) -> Records:
    records = Records()
    options = {"max_epochs": 1, "log_every": 1, **options}
    trainer = Trainer(callbacks=[monitor, *extra, records], trackers=False, progress=False, **options)
    trainer.fit(task, [torch.ones(1, 1)] * batches, [torch.ones(1, 1)])
    return records


def halves(task: nn.Module) -> Iterable[nn.Module]:
    return list(task.children())


def test_one_optimizer_is_lr_and_follows_its_schedule() -> None:
    def make(task: nn.Module) -> Any:
        optimizer = SGD(task.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    records = fit(Tiny(make), LearningRateMonitor(), batches=4)
    assert records.values("lr") == [{"lr": 0.5}, {"lr": 0.25}, {"lr": 0.125}, {"lr": 0.0625}]


def test_a_step_gets_its_rate_once() -> None:
    records = fit(Tiny(lambda t: SGD(t.parameters(), lr=1.0)), LearningRateMonitor(), batches=2)
    assert [step for step, metrics in records.all if "lr" in metrics] == [1, 2]
    assert [step for step, metrics in records.all].count(2) > 1  # the validation's record as well


def test_groups_and_their_names() -> None:
    def make(task: Any) -> Optimizer:
        groups = [{"params": task.first.parameters(), "lr": 0.1}, {"params": task.second.parameters(), "name": "head"}]
        return SGD(groups, lr=0.2)

    records = fit(Tiny(make), LearningRateMonitor())
    assert records.values("lr")[0] == {"lr/group0": 0.1, "lr/head": 0.2}


def test_several_optimizers() -> None:
    def make(task: Any) -> list[Optimizer]:
        groups: list[dict[str, Any]] = [{"params": [task.second.weight]}, {"params": [task.second.bias], "lr": 0.4}]
        return [SGD([task.first.weight], lr=0.1), SGD([task.first.bias], lr=0.2), Adam(groups, lr=0.3)]

    records = fit(Tiny(make, automatic=False), LearningRateMonitor())
    assert records.values("lr")[0] == {"lr/SGD": 0.1, "lr/SGD-1": 0.2, "lr/Adam/group0": 0.3, "lr/Adam/group1": 0.4}


def test_momentum_and_weight_decay() -> None:
    def make(task: Any) -> list[Optimizer]:
        return [
            SGD(task.first.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5),
            Adam(task.second.parameters(), lr=0.1, betas=(0.8, 0.99)),
        ]

    records = fit(Tiny(make, automatic=False), LearningRateMonitor(momentum=True, weight_decay=True))
    assert records.values("momentum", "weight_decay")[0] == {
        "momentum/SGD": 0.9,
        "weight_decay/SGD": 0.5,
        "momentum/Adam": 0.8,
        "weight_decay/Adam": 0.0,
    }


def test_a_group_added_later_leaves_the_first_its_name() -> None:
    class Unfreeze(Callback):
        def on_epoch_start(self, trainer: Any, task: Any) -> None:
            if trainer.state.epoch == 1:
                trainer.optimizers[0].add_param_group({"params": task.second.parameters(), "lr": 0.01})

    task = Tiny(lambda t: SGD(t.first.parameters(), lr=1.0))  # type: ignore[union-attr]
    records = fit(task, LearningRateMonitor(), Unfreeze(), batches=1, max_epochs=2)
    assert records.values("lr") == [{"lr": 1.0}, {"lr": 1.0, "lr/group1": 0.01}]


def test_a_tensor_rate() -> None:
    records = fit(Tiny(lambda t: SGD(t.parameters(), lr=torch.tensor(0.5))), LearningRateMonitor())
    assert records.values("lr")[0] == {"lr": 0.5}


def test_no_optimizer_is_an_error() -> None:
    task = Tiny(lambda t: [], automatic=False)
    with pytest.raises(ConfigError, match=r"LearningRateMonitor found no optimizer\. Return one from"):
        fit(task, LearningRateMonitor())


def test_a_later_validation_has_no_rate() -> None:
    records = Records()
    trainer = Trainer(max_epochs=1, callbacks=[LearningRateMonitor(), records], trackers=False, progress=False)
    task = Tiny(lambda t: SGD(t.parameters(), lr=1.0))
    trainer.fit(task, [torch.ones(1, 1)])
    records.all.clear()
    trainer.validate(task, [torch.ones(1, 1)])
    assert records.values("lr") == []


@pytest.mark.parametrize("option", ["momentum", "weight_decay"])
def test_arguments_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"LearningRateMonitor\({option}='false'\)\. Expected True or False"):
        LearningRateMonitor(**{option: "false"})
