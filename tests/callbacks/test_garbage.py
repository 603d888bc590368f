"""`GarbageCollection`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.garbage import GarbageCollection
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer


@pytest.fixture(autouse=True)
def collector_is_as_before() -> Iterator[None]:
    """The tests are about this: fail one that leaves the collector off or objects frozen."""
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    yield
    left = gc.isenabled(), gc.get_freeze_count()
    gc.enable()
    gc.unfreeze()
    assert left == (True, 0)


class Cycles(Task):
    """Makes a garbage cycle in each batch, and counts those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        cycle = Cycle()
        cycle.itself = cycle
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cycle:
    itself: Cycle
    alive = 0

    def __init__(self) -> None:
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


class Watch(Callback):
    """Writes down at each event whether the collector is on, and how many cycles live."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, int]] = []

    def _see(self, event: str) -> None:
        self.seen.append((event, gc.isenabled(), Cycle.alive))

    def on_epoch_start(self, trainer: Any, task: Any) -> None:
        self._see("epoch start")

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        self._see("step")

    def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        self._see("validation")


BATCHES = [torch.ones(1, 1)]


def fit(every: Any, *, batches: int, task: Task | None = None, **options: Any) -> Watch:
    watch = Watch()
    options = {"max_epochs": 1, "sanity_val_batches": 0, **options}
    trainer = Trainer(callbacks=[GarbageCollection(every), watch], trackers=False, progress=False, **options)
    trainer.fit(task or Cycles(), BATCHES * batches, BATCHES)
    return watch


def test_off_during_steps_and_on_in_between() -> None:
    gc.collect()
    Cycle.alive = 0
    seen = fit("2 steps", batches=4, max_epochs=2).seen
    epoch = [
        ("epoch start", True, 0),
        # Step 1 switches the collector off, for which the young are collected; steps 2 and 4 are due.
        ("step", False, 0), ("step", False, 0), ("step", False, 1), ("step", False, 0),
        ("validation", True, 0),
    ]  # fmt: skip
    assert [(event, on) for event, on, _ in seen] == [(event, on) for event, on, _ in epoch] * 2
    assert seen == epoch * 2


def test_a_bare_number_counts_steps_whatever_the_accumulation() -> None:
    gc.collect()
    Cycle.alive = 0
    seen = fit(2, batches=8, accumulate=2).seen
    # Two cycles a step; the first step's own are collected when the collector goes off.
    assert [alive for event, _, alive in seen if event == "step"] == [0, 0, 2, 0]


def test_restored_after_an_exception() -> None:
    class Broken(Cycles):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 2:
                assert not gc.isenabled()
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="broken"):
        fit("100 steps", batches=4, task=Broken())
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        seen = fit("2 steps", batches=4).seen
        assert not gc.isenabled()
        assert not any(on for _, on, _ in seen)
    finally:
        gc.enable()


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        fit("2 steps", batches=4)
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.5)  # freed objects leave
    finally:
        gc.unfreeze()


def test_a_bad_interval() -> None:
    with pytest.raises(ConfigError, match=r"GarbageCollection\(every\)='2 stpes' has an unknown unit 'stpes'"):
        GarbageCollection("2 stpes")


class FromWorker(torch.utils.data.Dataset[Tensor]):
    """Says whether the collector is on where the data is loaded."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(gc.isenabled())])


def test_workers_of_loaders_keep_theirs_on() -> None:
    class Workers(Cycles):
        def __init__(self) -> None:
            super().__init__()
            self.on: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.on += batch.flatten().tolist()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.on += batch.flatten().tolist()

    task = Workers()
    loader = torch.utils.data.DataLoader(FromWorker(), num_workers=1, multiprocessing_context="fork")
    options: dict[str, Any] = {"sanity_val_batches": 0, "trackers": False, "progress": False}
    Trainer(max_epochs=2, callbacks=[GarbageCollection(1)], **options).fit(task, loader, loader)
    assert task.on == [1.0] * 8
