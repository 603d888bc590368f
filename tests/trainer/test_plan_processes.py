"""The plan of a run on two processes: what it says is what `fit` does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]


class Constant(Task):
    """Logs each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", 1.0)
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int, batch_size: int, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.ones(count, 1)), batch_size=batch_size, **options)


CASES: list[tuple[tuple[int, int, bool, bool], dict[str, Any]]] = [
    ((22, 2, False, False), {"max_epochs": 2, "accumulate": 2}),
    ((22, 2, True, True), {"max_epochs": 2, "accumulate": 2}),
    ((20, 3, False, True), {"max_epochs": 3, "accumulate": 3, "accumulate_across_epochs": "carry"}),
    ((20, 3, False, False), {"max_epochs": 2, "accumulate": 3, "accumulate_across_epochs": "drop"}),
    ((30, 2, False, False), {"max_steps": "18 samples", "log_every": "8 samples"}),
    ((5, 2, False, False), {"max_epochs": 1, "limit_batches": 1}),
]


def make_trainer(options: dict[str, Any], tracker: MemoryTracker, **more: Any) -> Trainer:
    given = {"log_every": 1, **options, **more}
    return Trainer(progress=False, trackers=tracker, project_dir=".", **given)


def _compare(case: int) -> tuple[list[Any], list[Any], str]:
    """The counts of the plan and those of the run."""
    (count, size, drops, shuffles), options = CASES[case]
    data = loader(count, size, drop_last=drops, shuffle=shuffles)
    tracker = MemoryTracker()
    trainer = make_trainer(options, tracker)
    plan = trainer.plan(Constant(), data)
    trainer.fit(Constant(), data)
    state = trainer.state
    steps = [step for step, metrics in tracker.runs[0].records if "train/loss" in metrics] if tracker.runs else []
    return (
        [plan.steps, plan.batches, plan.samples, plan.due.get("log")],
        [state.step, state.micro_step, state.samples, steps],
        str(plan),
    )


def test_the_plan_is_what_fit_does(two_processes: Run) -> None:
    for case in range(len(CASES)):
        (planned, done, text), (_, done_there, _) = two_processes(_compare, case)
        assert planned == done, CASES[case]
        assert done_there[:3] == done[:3]
        assert text.startswith("Processes   2, a step takes ")


def test_a_trainer_that_was_not_launched_plans_for_its_devices() -> None:
    plan = make_trainer({"max_epochs": 2, "accumulate": 2}, MemoryTracker(), devices=2).plan(Constant(), loader(22, 2))
    # 11 batches of 2: 6 for each process, of which the last is completed from the start.
    assert (plan.num_processes, plan.steps, plan.batches, plan.samples, plan.samples_per_step) == (2, 6, 12, 48, 8)
    assert str(plan).splitlines()[0] == "Processes   2, a step takes 8 samples of all; batches are those of each"


def test_unequal_batches_of_a_list_are_not_counted() -> None:
    batches = [[torch.ones(size, 1)] for size in (2, 2, 1)]
    plan = make_trainer({"max_epochs": 1}, MemoryTracker(), devices=2).plan(Constant(), batches)
    assert (plan.steps, plan.samples, plan.samples_per_step) == (2, None, None)
    assert "Processes   2; batches are those of each" in str(plan)
