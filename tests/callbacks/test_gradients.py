"""`GradientMonitor`: norms worked out by hand, in real fits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from loopwright import Callback, ConfigError, GradientMonitor, Task, Trainer


class Records(Callback):
    """Keeps every record that has a norm, by its step."""

    after = (GradientMonitor,)

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, float]] = {}

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        norms = {name: value for name, value in metrics.items() if name.startswith("grad_norm")}
        if norms:
            assert step not in self.by_step
            self.by_step[step] = norms


class Line(Task):
    """Gradients: 3 for `a.weight` and 4 for `a.bias` times the batch's value, 12 for `b.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.b = nn.Linear(1, 1, bias=False)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = 3 * self.a.weight + 4 * self.a.bias + 12 * self.b.weight
        return (loss * batch).sum()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Two(Task):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward((3 * self.a.weight).sum())
        first.step()
        self.manual_backward((5 * self.b.weight).sum())
        second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [SGD(self.a.parameters(), lr=0.1), SGD(self.b.parameters(), lr=0.1)]


def norms(monitor: GradientMonitor, task: Task | None = None, batches: int = 4, **arguments: Any) -> Any:
    records = Records()
    trainer = Trainer(
        max_epochs=1, callbacks=[records, monitor], trackers=False, progress=False, **{"log_every": 1, **arguments}
    )
    trainer.fit(task or Line(), [torch.ones(1)] * batches)
    return records.by_step


def test_total_is_over_all_parameters_on_the_steps_that_are_due() -> None:
    assert norms(GradientMonitor(2)) == {2: {"grad_norm": 13.0}, 4: {"grad_norm": 13.0}}  # sqrt(9 + 16 + 144)


def test_first_and_every() -> None:
    assert list(norms(GradientMonitor(["first", "3 steps"]), batches=6)) == [1, 3, 6]


def test_each_module_and_each_parameter() -> None:
    assert norms(GradientMonitor(1, per_module=True, per_parameter=True), batches=1)[1] == {
        "grad_norm": 13.0,
        "grad_norm/a": 5.0,
        "grad_norm/b": 12.0,
        "grad_norm/a.weight": 3.0,
        "grad_norm/a.bias": 4.0,
        "grad_norm/b.weight": 12.0,
    }


@pytest.mark.parametrize(("norm_type", "total"), [(1.0, 19.0), (math.inf, 12.0)])
def test_other_norms(norm_type: float, total: float) -> None:
    assert norms(GradientMonitor(1, norm_type), batches=1) == {1: {"grad_norm": total}}


def test_norm_is_that_of_the_whole_window_and_after_clipping() -> None:
    assert norms(GradientMonitor(1), accumulate=4) == {1: {"grad_norm": 13.0}}
    assert norms(GradientMonitor(1), batches=1, clip_norm=6.5)[1]["grad_norm"] == pytest.approx(6.5)


def test_next_record_takes_the_newest_norm() -> None:
    assert norms(GradientMonitor(2), log_every=3, batches=6) == {3: {"grad_norm": 13.0}, 6: {"grad_norm": 13.0}}


def test_several_optimizers_have_a_total_each() -> None:
    assert norms(GradientMonitor(1), Two(), batches=1) == {
        1: {"grad_norm/optimizer_0": 3.0, "grad_norm/optimizer_1": 5.0}
    }


def test_sparse_gradients() -> None:
    class Embedded(Line):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 1, sparse=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.table(torch.tensor([3, 3, 5])).sum()  # type: ignore[no-any-return]

    found = norms(GradientMonitor(1), Embedded(), batches=1)
    assert found[1]["grad_norm"] == pytest.approx(math.sqrt(5))  # gradients 2 and 1


def test_tensors_are_read_only_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        read.append(1)
        return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", counting)
    assert norms(GradientMonitor(1), log_every="4 steps", batches=8).keys() == {4, 8}
    assert len(read) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "1 epoch"}, "has to know beforehand which step is due. Expected optimizer steps"),
        ({"every": "last"}, "has to know beforehand"),
        ({"norm_type": 0}, r"norm_type=0\). Expected a number above 0. math.inf takes"),
        ({"norm_type": "x"}, r"GradientMonitor\(norm_type='x'\). Expected a number above 0"),
        ({"per_module": "false"}, r"per_module='false'\). Expected True or False"),
        ({"per_parameter": 1}, r"per_parameter=1\). Expected True or False"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientMonitor(**arguments)
