"""What came due at a step and was not done, since the run ended there, is made up for by the run that goes on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback, StopRun
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.distributed.random import set_seed

from .tiny import Loss, Scalar, Watch, batches, ones, trainer

EVENTS = ("on_step", "on_batch_end", "on_log", "on_validation_start", "on_validation_batch_end", "on_validation_end")


class Boom(Exception):  # noqa: N818 - it stands for any error
    """An error of a callback."""


class Raises(Callback):
    """Raises once, in an event behind so many steps."""

    def __init__(self, event: str, step: int, error: type[Exception]) -> None:
        self.step, self.error, self.has_raised = step, error, False
        setattr(self, event, self.look)

    def look(self, trainer: Any, task: Any, *values: Any) -> None:
        if trainer.state.step == self.step and not self.has_raised:
            self.has_raised = True
            raise self.error


class Logs(Scalar):
    """Logs its loss by step and by epoch, and its validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach() + batch.mean(), on_step=True, on_epoch=True)
        return loss


def leg(folder: Path, *callbacks: Callback, resume_from: Any = None, **options: Any) -> tuple[Any, ...]:
    """Two epochs of six batches; gives the rows, the weight and the counters."""
    set_seed(1)
    task = Logs(lr=0.1, momentum=0.9)
    defaults: dict[str, Any] = {"max_epochs": 2, "val_every": "3 steps", "log_every": 1}
    found = trainer(
        callbacks=[ModelCheckpoint("100 steps"), *callbacks], trackers="jsonl", project_dir=folder, name="run",
        **defaults | options,
    )  # fmt: skip
    data = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)
    try:
        found.fit(task, data, batches(1, 2, 3), resume_from=resume_from)
    except Boom:
        assert any(isinstance(each, Raises) for each in callbacks)
    return (folder / "run" / "metrics.jsonl").read_text().splitlines(), task.value, found.state.counters()


@pytest.mark.filterwarnings("ignore:the resumed run can't be equal bit for bit")
@pytest.mark.parametrize("error", [Boom, StopRun])
@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("event", EVENTS)
def test_what_was_due_at_the_step_of_an_error(event: str, step: int, error: type[Exception], tmp_path: Path) -> None:
    """In the middle of an epoch, and at its last step: the epoch is neither lost nor trained twice."""
    raises = Raises(event, step, error)
    leg(tmp_path / "legs", raises)
    assert raises.has_raised
    assert leg(tmp_path / "legs", resume_from="latest") == leg(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:the resumed run can't be equal bit for bit")
@pytest.mark.parametrize("event", ["on_step", "on_batch_end", "on_validation_end", "on_epoch_end"])
@pytest.mark.parametrize(("remainder", "step"), [("flush", 3), ("carry", 2)])
def test_windows_of_several_batches(event: str, remainder: Any, step: int, tmp_path: Path) -> None:
    options = {"accumulate": 4 if remainder == "carry" else 2, "accumulate_across_epochs": remainder, "val_every": 1}
    raises = Raises(event, step, Boom)
    leg(tmp_path / "legs", raises, **options)
    if not raises.has_raised:
        assert (event, remainder) == ("on_epoch_end", "carry")  # step 2 is inside an epoch
        return
    assert leg(tmp_path / "legs", resume_from="latest", **options) == leg(tmp_path / "whole", **options)


@pytest.mark.filterwarnings("ignore:the resumed run can't be equal bit for bit")
def test_an_exception_while_a_window_is_open_over_an_epochs_end_loses_no_batch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 4, "accumulate_across_epochs": "carry", "val_every": 1}
    leg(tmp_path / "legs", Raises("on_epoch_end", 1, Boom), **options)
    _, *found = leg(tmp_path / "legs", resume_from="latest", **options)
    _, *expected = leg(tmp_path / "whole", **options)
    assert found == expected


class ByEpoch(Loss):
    """Its learning rate is halved after each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "epoch"}}


def test_a_stop_out_of_an_epochs_record_closes_the_epoch_whole() -> None:
    def stop(trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        if "loss" in metrics:
            raise StopRun("seen enough")

    task = ByEpoch(on_step=False, on_epoch=True)
    trainer(max_epochs=3, callbacks=Watch(log=stop)).fit(task, ones(2))
    assert task.schedule.get_last_lr() == [0.5]


def test_a_save_in_the_end_of_an_epoch_that_a_limit_cuts_keeps_the_last_steps_record(tmp_path: Path) -> None:
    def rows(name: str, **options: Any) -> list[str]:
        def save(trainer: Any, task: Any, metrics: Any) -> None:
            trainer.save_state(tmp_path / "saved")

        callbacks = [] if options else [Watch(epoch_end=save)]
        found = trainer(
            max_steps=2, callbacks=callbacks, trackers="jsonl", log_every="50 steps", project_dir=tmp_path, name=name
        )  # fmt: skip
        found.fit(Loss(on_step=True), batches(1, 2, 3), **options)
        return (tmp_path / name / "metrics.jsonl").read_text().splitlines()

    expected = rows("run")
    assert len(expected) == 1 and '"loss": 2.0' in expected[0]
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert rows("run", resume_from=tmp_path / "saved") == expected


def test_a_finished_run_that_goes_on_from_a_checkpoint_of_its_own_keeps_one(tmp_path: Path) -> None:
    found = trainer(callbacks=ModelCheckpoint(directory=tmp_path / "one"))
    found.fit(Scalar(), ones(3))
    found.save_state(tmp_path / "saved")
    (tmp_path / "one" / "step=000003").rename(tmp_path / "elsewhere")
    saver = ModelCheckpoint(directory=tmp_path / "two")
    with pytest.warns(UserWarning, match="step=000003' of step 3 is gone"):
        trainer(callbacks=saver).fit(Scalar(), ones(3), resume_from=tmp_path / "saved")
    assert [(each.path, each.step) for each in saver.kept] == [(tmp_path / "two" / "step=000003", 3)]
    assert open_checkpoint(tmp_path / "two" / "step=000003").manifest.progress["step"] == 3


def damaged(folder: str, damage: str | None) -> tuple[Any, ...]:
    """Four steps, each saved; the newest checkpoint loses a file; then two more. Gives where each process went on."""
    if damage is not None:
        first = trainer(max_steps=4, callbacks=ModelCheckpoint(1, top_k=-1, directory=Path(folder)), name="run")
        first.fit(Scalar(lr=0.1, momentum=0.9), DataLoader(torch.arange(12.0), batch_size=1))
        if first.process.is_main_process:
            (Path(folder) / "step=000004" / damage).unlink()
        first.process.wait_for_everyone()
    task = Scalar(lr=0.1, momentum=0.9)
    second = trainer(max_steps=6, callbacks=ModelCheckpoint(100, directory=Path(folder)), name="run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.fit(task, DataLoader(torch.arange(12.0), batch_size=1), resume_from="latest")
    return second.resumed_step, task.value, [str(each.message) for each in caught if "damaged" in str(each.message)]


@pytest.mark.parametrize("damage", ["model.safetensors", "process-00001.json", "optimizers.json"])
def test_two_processes_go_on_from_the_newest_whole_checkpoint(two_processes: Any, tmp_path: Path, damage: str) -> None:
    (whole, expected, _), _ = two_processes(damaged, str(tmp_path / "whole"), None)
    first, second = two_processes(damaged, str(tmp_path / "legs"), damage)
    assert (first[:2], second[:2]) == ((3, expected), (3, expected))
    assert whole is None
    assert len(first[2]) == 1 and damage in first[2][0] and "step=000004" in first[2][0]
    assert second[2] == []
