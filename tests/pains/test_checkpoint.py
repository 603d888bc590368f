"""Pains 17, 18, 19, 21 and 37, as far as they are about which checkpoints a run keeps."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.checkpoint.finding import newest
from loopwright.distributed.errors import MetricError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from ..callbacks.counting import batches, fit, states


def test_pain_17_saved_scores_belong_to_the_steps_that_reached_them(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint("10 steps", monitor="val/loss", top_k=3, directory="out")
    fit(checkpoint, [3.0, 1.0, 2.0], train=batches(30), val_every="10 steps", max_epochs=1)
    assert {file.step: file.score for file in checkpoint.kept} == {10: 3.0, 20: 1.0, 30: 2.0}
    assert checkpoint.best_path == tmp_path / "out/step=000020"
    assert states(tmp_path / "out")["step=000020"] == -20.0


def test_pain_17_a_name_that_nobody_logs_fails_at_the_first_validation() -> None:
    checkpoint = ModelCheckpoint("never", monitor="nope", directory="out", filename="{nope:.2f}")
    with pytest.raises(MetricError, match=r"monitor='nope'\) was never logged"):
        fit(checkpoint, [1.0, 1.0], max_epochs=9)


def test_pain_18_the_best_and_the_patience_survive_a_resume(tmp_path: Path) -> None:
    def callbacks() -> tuple[ModelCheckpoint, EarlyStopping]:
        return ModelCheckpoint(monitor="val/loss", directory="out"), EarlyStopping("val/loss", patience=3)

    checkpoint, stopping = callbacks()
    fit(checkpoint, [1.0, 2.0, 2.0], callbacks=[stopping])
    checkpoint, stopping = callbacks()
    trainer = fit(checkpoint, [2.0, 0.1], callbacks=[stopping], resume_from="latest", max_epochs=5)
    assert trainer.state.step == 4  # the third bad one
    assert (checkpoint.best_score, stopping.best_score) == (1.0, 1.0)
    assert states(tmp_path / "out") == {"step=000001": -1.0, "step=000004": -4.0}
    checkpoint, stopping = callbacks()
    trainer = fit(checkpoint, [0.1], callbacks=[stopping], resume_from="latest", max_epochs=5)
    assert trainer.state.step == 4  # what had stopped stays stopped


class Killed(Task):
    """Half a megabyte of weights, each minus the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(128_000))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.w.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(steps: int, saved: Any = None) -> float:
    task = Killed()
    checkpoint = ModelCheckpoint(1, directory="out", asynchronous=steps % 2 == 0)
    trainer = Trainer(max_steps=steps, callbacks=checkpoint, trackers=False, progress=False, name="run")
    if saved is not None:
        trainer.on("saved", lambda *_: saved.set())
    trainer.fit(task, batches(100_000), resume_from="latest")
    (value,) = task.w.unique().tolist()
    return float(value)


def test_pain_19_kills_at_random_times_leave_a_whole_newest_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    times, reached = random.Random(0), 0
    for number in range(8):
        saved = context.Event()
        child = context.Process(target=train, args=(100_000 + number, saved))
        child.start()
        assert saved.wait(30)
        time.sleep(times.uniform(0.0, 0.05))
        child.kill()
        child.join(10)
        last = newest(tmp_path / "out")
        assert last is not None  # whole, by its checksums
        step = int(last.manifest.progress["step"])
        assert step > reached
        reached = step
    assert train(reached + 1) == -reached - 1.0
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [f"step={reached + 1:06d}"]


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "model.safetensors", "process-00000.json"])
def test_pain_19_a_truncated_newest_one_is_passed_over_by_name(tmp_path: Path, file: str) -> None:
    fit(ModelCheckpoint(1, top_k=2, directory="out"), train=batches(3))
    damaged = tmp_path / "out/step=000003" / file
    damaged.write_bytes(damaged.read_bytes()[:-7])
    second = ModelCheckpoint(1, top_k=2, directory="out")
    with pytest.warns(UserWarning) as caught:
        trainer = fit(second, train=batches(3), resume_from="latest", max_epochs=4 / 3)
    assert any("step=000003" in str(each.message) and file in str(each.message) for each in caught)
    assert trainer.resumed_step == 2
    assert (tmp_path / "out/step=000003").is_dir()  # nothing that is damaged is removed
    assert second.last_path == tmp_path / "out/step=000004"


def test_pain_37_one_folder_where_the_newest_is_the_best_and_two_where_not(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss", directory="one"), [2.0, 1.0])
    fit(ModelCheckpoint(monitor="val/loss", directory="two"), [1.0, 2.0])
    fit(ModelCheckpoint(monitor="val/loss", directory="three", last=False), [1.0, 2.0])
    assert states(tmp_path / "one") == {"step=000002": -2.0}
    assert states(tmp_path / "two") == {"step=000001": -1.0, "step=000002": -2.0}
    assert states(tmp_path / "three") == {"step=000001": -1.0}
