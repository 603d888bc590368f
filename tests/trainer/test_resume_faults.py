"""A disk that fills up, or a folder that can't be written to any more, in the middle of a training."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.distributed.errors import CheckpointError
from loopwright.distributed.random import set_seed
from loopwright.trainer.task import Task

from ..nursery import nursery
from .tiny import trainer

SIZE = 30_000
SCRIPT = Path(__file__).with_name("read_only_training.py")


class Wide(Task):
    """Weights and momentum of 120 kB each, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE))
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.dropout(self.w) * batch.mean()).sin().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=100.0, momentum=0.9)


class Calls(Callback):
    """Calls something behind step 3, when the checkpoint of step 2 is there."""

    def __init__(self, folder: Path, act: Callable[[], object]) -> None:
        self.saved, self.act = folder / "step=000002", act

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 3:
            give_up = time.monotonic() + 60
            while not self.saved.exists():
                assert time.monotonic() < give_up
                time.sleep(0.01)
            self.act()


def leg(folder: Path, *callbacks: Callback, asynchronous: bool = False, resume_from: Any = None) -> tuple[Any, Any]:
    """Eight steps, a checkpoint every two. Gives the weights, and the step that it went on from."""
    set_seed(1)
    task = Wide()
    saver = ModelCheckpoint("2 steps", directory=folder, asynchronous=asynchronous)
    found = trainer(max_epochs=2, callbacks=[*callbacks, saver])
    found.fit(task, DataLoader(torch.arange(8.0), batch_size=2, shuffle=True), resume_from=resume_from)
    return task.w.detach().clone(), found.resumed_step


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up_ends_the_run_and_what_was_saved_goes_on(
    small_disk: Path, tmp_path: Path, asynchronous: bool
) -> None:
    filler = small_disk / "filler"
    fill = Calls(small_disk / "saved", lambda: filler.write_bytes(bytes(1_600_000)))
    with pytest.raises(CheckpointError, match=r"needs 5\d\d\.\d kB, and \d+\.\d kB are free at .*Nothing was written"):
        leg(small_disk / "saved", fill, asynchronous=asynchronous)
    assert os.listdir(small_disk / "saved") == ["step=000002"]
    assert open_checkpoint(small_disk / "saved" / "step=000002", verify="full").manifest.progress["step"] == 2
    filler.unlink()
    found, resumed_step = leg(small_disk / "saved", asynchronous=asynchronous, resume_from="latest")
    expected, _ = leg(tmp_path / "whole")
    assert resumed_step == 2
    assert torch.equal(found, expected)
    assert sorted(os.listdir(small_disk / "saved")) == ["step=000008"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_that_fails_half_way_ends_the_run_and_what_was_saved_goes_on(
    tmp_path: Path, asynchronous: bool
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = Calls(tmp_path / "saved", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1])))
    try:
        with pytest.raises(CheckpointError, match="can't be written: File too large"):
            leg(tmp_path / "saved", limit, asynchronous=asynchronous)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / "saved") == ["step=000002"]
    found, resumed_step = leg(tmp_path / "saved", asynchronous=asynchronous, resume_from="latest")
    assert resumed_step == 2
    assert torch.equal(found, leg(tmp_path / "whole")[0])


def test_a_folder_that_becomes_read_only_ends_the_run_and_what_was_saved_goes_on() -> None:
    done = nursery().run(SCRIPT, timeout=100)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    error, names, resumed_step, is_equal = done.stdout.splitlines()
    assert "step=000004" in error and "can't be written: Permission denied" in error
    assert (names, resumed_step, is_equal) == ("['.claim', 'step=000002']", "2", "True")
