"""Cases of the checkpoints that a run keeps, each by its id in the list of cases."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.kept_checkpoints import KeptCheckpoints, SavedCheckpoint
from loopwright.checkpoint.finding import find_checkpoints, newest
from loopwright.distributed.errors import CheckpointError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from ..callbacks.counting import batches, fit, states

FORK = multiprocessing.get_context("fork")


class Large(Task):
    """Takes a while to be written: 16 MB of weights, which all are minus the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4_000_000))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.w.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_large(steps: int, every: int, **options: Any) -> Large:
    task = Large()
    checkpoint = ModelCheckpoint(every, directory="out", **options)
    trainer = Trainer(max_steps=steps, callbacks=checkpoint, trackers=False, progress=False, name="run")
    trainer.fit(task, batches(1000), resume_from="latest")
    return task


def wait_for(pattern: str, child: Any) -> None:
    deadline = time.monotonic() + 30
    while not list(Path("out").glob(pattern)):
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_b29_a_kill_during_a_save_leaves_the_one_before(tmp_path: Path, asynchronous: bool) -> None:
    # Its own name is seen before and after, but the second checkpoint is only half written when the kill comes.
    child = FORK.Process(target=train_large, args=(10_000, 10), kwargs={"top_k": 3, "asynchronous": asynchronous})
    child.start()
    wait_for("step=000010", child)
    wait_for(".step=*.partial", child)
    child.kill()
    child.join(10)
    assert child.exitcode == -signal.SIGKILL
    found = find_checkpoints(tmp_path / "out")
    last = newest(tmp_path / "out")
    assert last is not None and last.path == found[-1].path  # all that has its name is whole
    step = int(last.manifest.progress["step"])
    assert step >= 10 and step % 10 == 0
    task = train_large(step + 1, 10_000, top_k=3)
    assert task.w.unique().tolist() == [-step - 1.0]
    assert not list((tmp_path / "out").glob(".*"))


def fail_at_the_second_save(said: Any) -> None:
    def fill(*_: Any) -> None:  # a limit of a file's size ends a write as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))

    trainer = Trainer(
        max_steps=20, callbacks=ModelCheckpoint(10, directory="out"), trackers=False, progress=False, name="run"
    )
    trainer.on("saved", fill)
    try:
        trainer.fit(Large(), batches(20))
    except CheckpointError as error:
        said.send((str(error), getattr(error, "__notes__", [])))


def test_b31_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=fail_at_the_second_save, args=(theirs,))
    child.start()
    assert ours.poll(30)
    text, _ = ours.recv()
    child.join(10)
    assert child.exitcode == 0
    assert "File too large" in text
    assert os.listdir(tmp_path / "out") == ["step=000010"]
    assert train_large(11, 100).w.unique().tolist() == [-11.0]


def test_b32_the_newest_are_kept_by_number_not_by_text(tmp_path: Path) -> None:
    fit(ModelCheckpoint(1, top_k=3, directory="out", filename="{step}"), train=batches(11))
    assert states(tmp_path / "out") == {"step=10": -10.0, "step=11": -11.0, "step=9": -9.0}
    kept = KeptCheckpoints(2, None)
    for step in (99, 100, 9900, 10000):
        kept.add(SavedCheckpoint(Path(f"step={step}"), step, None))
    assert [file.step for file in kept.ranked] == [10000, 9900]


@pytest.mark.parametrize("weights_only", [False, True])
def test_b34_nan_is_never_best_and_any_finite_value_replaces_it(tmp_path: Path, weights_only: bool) -> None:
    def run(values: list[float], folder: str, top_k: int = 1) -> ModelCheckpoint:
        checkpoint = ModelCheckpoint(
            monitor="val/loss", top_k=top_k, last=False, directory=folder, save_weights_only=weights_only
        )
        fit(checkpoint, values)
        return checkpoint

    one = run([math.nan, 0.5, math.nan, 0.4, 0.6], "one")
    assert (one.best_score, [file.step for file in one.kept]) == (0.4, [4])
    assert len(os.listdir(tmp_path / "one")) == 1
    every = run([math.nan, math.inf, -math.inf, 0.6], "all", top_k=-1)
    assert (every.best_score, len(os.listdir(tmp_path / "all"))) == (0.6, 4)


@pytest.mark.parametrize(("weights_only", "suffix"), [(False, ""), (True, ".safetensors")])
def test_b35_a_slash_in_a_metrics_name_makes_no_folder(tmp_path: Path, weights_only: bool, suffix: str) -> None:
    checkpoint = ModelCheckpoint(
        monitor="val/loss",
        directory="out",
        last=False,
        filename="{epoch}-{val/loss:.2f}",
        save_weights_only=weights_only,
    )
    fit(checkpoint, [0.3, 0.2, 0.1])
    assert os.listdir(tmp_path / "out") == [f"epoch=2-val_loss=0.10{suffix}"]


def test_b35_a_resume_finds_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"monitor": "val/loss", "directory": "out", "filename": "{epoch}-{val/loss:.2f}"}
    fit(ModelCheckpoint(**options), [0.3, 0.2])
    trainer = fit(ModelCheckpoint(**options), [0.1], resume_from="latest", max_epochs=3)
    assert trainer.resumed_step == 2
    assert states(tmp_path / "out") == {"epoch=2-val_loss=0.10": -3.0}


def test_b101_a_stale_folder_with_a_higher_number_stays_and_wins_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    fit(ModelCheckpoint(500, directory=folder, filename="{step}"), train=batches(500), name="old")
    fit(ModelCheckpoint(7, top_k=1, directory=folder, filename="{step}"), train=batches(7), name="fresh")
    assert states(folder) == {"step=500": -500.0, "step=7": -7.0}
    last = newest(folder)
    assert last is not None and last.path.name == "step=7"


@pytest.mark.parametrize("top_k", [-1, 3])
def test_b103_the_best_path_is_right_when_several_are_kept(tmp_path: Path, top_k: int) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", mode="max", top_k=top_k, directory="out", last=False)
    fit(checkpoint, [0.2, 0.9, 0.5, 0.7])
    assert (checkpoint.best_score, checkpoint.best_path) == (0.9, tmp_path / "out/step=000002")
    assert [file.score for file in checkpoint.kept] == [0.9, 0.7, 0.5] + [0.2] * (top_k == -1)
    assert len(states(tmp_path / "out")) == len(checkpoint.kept)
