"""Signals and stops inside an evaluation of several processes: all leave it behind the same batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback, StopRun
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.preemption import Preemption
from loopwright.checkpoint.finding import find_checkpoints
from loopwright.data.prepare import Presharded
from loopwright.distributed.random import set_seed

from .tiny import Scalar, batches, ones, trainer

Run = Callable[..., list[Any]]
MANY = 3000
"""Validation batches, of which those behind the signal take longer than any call of the roll."""


class Meets(Scalar):
    """Its validation step has a collective of its own, which all processes have to make equally often."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, momentum=0.9)
        self.num_validated = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated += 1
        total = batch.clone()
        dist.all_reduce(total)
        self.log("val", total.mean() * self.w.detach())


class Sends(Callback):
    """Sends one process a signal behind a batch of a validation, or raises `StopRun` in it."""

    def __init__(self, name: str, index: int, batch: int, event: str = "on_validation_batch_end") -> None:
        self.name, self.index, self.batch = name, index, batch
        self.num_seen = 0
        setattr(self, event, self.look)

    def look(self, trainer: Any, task: Any, *values: Any) -> None:
        if trainer.process.process_index != self.index or trainer.state.step != 2:
            return
        self.num_seen += 1
        if self.num_seen == self.batch and self.name == "StopRun":
            raise StopRun("seen enough")
        if self.num_seen == self.batch:
            os.kill(os.getpid(), signal.Signals[self.name])


def leg(folder: str, *callbacks: Callback, **options: Any) -> tuple[Any, ...]:
    """Four steps with a validation behind each second one; gives the exit code, and what there is at the end."""
    set_seed(1)
    task = Meets()
    callbacks = (ModelCheckpoint("100 steps"), Preemption(), *callbacks)
    found = trainer(callbacks=callbacks, trackers="jsonl", log_every=1, project_dir=folder, name="run", val_every=2)
    code = None
    try:
        found.fit(task, Presharded(batches(1, 2, 3, 6)), Presharded(ones(MANY)), **options)
    except SystemExit as end:
        code = end.code
    return code, found.state.step, found.signal, task.num_validated, task.value, dict(found.metrics)


def signalled(folder: str, name: str) -> list[Any]:
    first = leg(f"{folder}/legs", Sends(name, 1, 40))
    return [leg(f"{folder}/whole"), first, leg(f"{folder}/legs", resume_from="latest")]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGUSR1", 138, marks=pytest.mark.slow)])
def test_pain_21_a_signal_in_a_validation_cuts_it_on_both_behind_the_same_batch(
    two_processes: Run, tmp_path: Path, name: str, code: int
) -> None:
    (whole, cut, resumed), (_, *others) = two_processes(signalled, str(tmp_path), name)
    assert cut[:3] == (code, 2, name)
    assert 40 < cut[3] < MANY
    assert [cut, resumed] == others
    assert resumed[3] == 2 * MANY  # the one that was cut is begun anew
    assert (whole[4], whole[5]) == (resumed[4], resumed[5])
    rows = [(tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("whole", "legs")]
    assert rows[0] == rows[1]
    found = find_checkpoints(tmp_path / "legs" / "run" / "checkpoints")
    assert [each.manifest.progress["step"] for each in found] == [4]


class Plain(Scalar, Callback):
    """Counts the batches of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_validated: list[int] = []

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self.num_validated.append(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated[-1] += 1
        super().validation_step(batch, batch_idx)


def uneven(folder: str, sender: int, counts: list[int], batch: int, name: str, event: str) -> tuple[Any, ...]:
    index = int(os.environ["RANK"])
    task = Plain()
    callbacks = [ModelCheckpoint(directory=Path(folder) / "out"), Sends(name, sender, batch, event)]
    found = trainer(callbacks=callbacks, val_every=2)
    try:
        found.fit(task, Presharded(ones(4)), Presharded(ones(counts[index])))
    except SystemExit:
        pass
    return found.state.step, found.signal, found.stop_reason, task.num_validated


@pytest.mark.parametrize(
    ("counts", "batch", "name", "event"),
    [
        ([3, MANY], 20, "SIGTERM", "on_validation_batch_end"),
        ([1, MANY], 20, "SIGTERM", "on_validation_batch_end"),
        ([3, MANY], 20, "StopRun", "on_validation_batch_end"),
        ([MANY, MANY], 1, "StopRun", "on_validation_batch_start"),
    ],
)
def test_processes_without_a_batch_wait_for_no_others_rest(
    two_processes: Run, tmp_path: Path, counts: list[int], batch: int, name: str, event: str
) -> None:
    first, second = two_processes(uneven, str(tmp_path), 1, counts, batch, name, event)
    assert first[:3] == second[:3]
    assert first[0] == 2
    assert first[1] == (None if name == "StopRun" else name)
    assert first[2] == ("process 1: seen enough" if name == "StopRun" else "process 1: SIGTERM: the process was asked "
                        "to end")  # fmt: skip
    # `StopRun` is no signal: the validation that it cut is made up for at the run's end.
    rest = counts if name == "StopRun" else [0, 0]
    assert first[3][0] == counts[0] if counts[0] < MANY else first[3][0] < MANY
    assert batch - 1 <= second[3][0] < MANY
    assert [first[3][1:], second[3][1:]] == [[rest[0]], [rest[1]]]


class Wide(Plain):
    """Has weights that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.layer = nn.Linear(4, 4, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean() + self.w.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.num_validated[-1] += 1
        self.log("val", self.layer(batch).mean())


def sharded(sender: int, counts: list[int], batch: int, name: str, event: str) -> tuple[Any, ...]:
    index = int(os.environ["RANK"])
    task = Wide()
    found = trainer(callbacks=[Sends(name, sender, batch, event)], val_every=2, strategy="fsdp")
    data = [torch.ones(2, 4)] * 4
    try:
        found.fit(task, Presharded(data), Presharded([torch.ones(1, 4)] * counts[index]))
    except SystemExit:
        pass
    return found.state.step, found.signal, task.num_validated


@pytest.mark.parametrize(
    ("sender", "counts", "name", "event"),
    [
        (1, [300, 300], "SIGTERM", "on_validation_batch_end"),
        (1, [3, 300], "SIGTERM", "on_validation_batch_end"),
        (0, [300, 290], "StopRun", "on_validation_batch_start"),
        (0, [300, 290], "StopRun", "on_validation_batch_end"),
    ],
)
def test_sharded_models_whose_forward_passes_need_all_processes(
    two_processes: Run, sender: int, counts: list[int], name: str, event: str
) -> None:
    found = two_processes(sharded, sender, counts, 5, name, event)
    assert {each[0] for each in found} == {2}
    assert {each[1] for each in found} == {None if name == "StopRun" else name}
    assert 4 <= found[sender][2][0] < 290
    if counts == [300, 300]:
        assert found[0] == found[1]


def test_a_complete_evaluation_counts_all_batches(two_processes: Run) -> None:
    """Also where one process has one, and the roll is called in between."""
    for counts in ([1, 2], [2, 1], [7, 4], [1, 700]):
        found = two_processes(whole, counts)
        assert found == [(4.0, [count, count]) for count in counts]


def whole(counts: list[int]) -> tuple[float, list[int]]:
    task = Plain()
    found = trainer(val_every=2)
    found.fit(task, Presharded(ones(4)), Presharded(batches(*[4.0] * counts[int(os.environ["RANK"])])))
    return found.metrics["val"], task.num_validated
