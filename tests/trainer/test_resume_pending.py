"""What is pending at a boundary goes on as well: found by random trainings that were saved and resumed at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from loopwright.callbacks.callback import Callback, EndEpoch, StopRun
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.callbacks.gradients import GradientMonitor
from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.checkpoint.finding import find_checkpoints
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.distributed.errors import CheckpointError, NonFiniteError
from loopwright.distributed.random import set_seed

from .tiny import Loss, Scalar, Watch, batches, ones, trainer


class Leaves(Callback):
    """Ends the first leg behind so many micro-batches, or in the validation there, and saves where it ends."""

    def __init__(self, at: int, path: Path, *, in_validation: bool = False) -> None:
        self.at, self.path, self.in_validation = at, path, in_validation

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.micro_step == self.at and not self.in_validation:
            trainer.stop("the leg ends")

    def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.micro_step == self.at and self.in_validation:
            raise StopRun("the leg ends in validation")

    def on_stop(self, trainer: Any, task: Any) -> None:
        trainer.save_state(self.path)


def both(
    folder: Path, make_task: Callable[[], Any], make_data: Callable[[], Any], at: int, val: Any = None,
    *, in_validation: bool = False, make_callbacks: Callable[[], list[Callback]] = list, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The task and the rows of a training that was never stopped, and of one that was stopped and resumed."""

    def leg(name: str, *callbacks: Callback, resume_from: Path | None = None) -> Any:
        found = trainer(
            trackers="jsonl",
            project_dir=folder / name,
            name="run",
            callbacks=[*make_callbacks(), *callbacks],
            **options,
        )
        task = make_task()
        found.fit(task, make_data(), val, resume_from=resume_from)
        return task, (folder / name / "run" / "metrics.jsonl").read_text().splitlines()

    set_seed(1)
    expected = leg("whole")
    set_seed(1)
    leg("legs", Leaves(at, folder / "saved", in_validation=in_validation))
    set_seed(2)
    return expected, leg("legs", resume_from=folder / "saved")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(LearningRateMonitor, {"log_every": 2, "val_every": 2}, id="rates of a step that has them"),
        pytest.param(lambda: NaNGuard("skip"), {"log_every": 2}, id="a counter that did not change"),
        pytest.param(lambda: GradientMonitor("2 steps"), {"log_every": "3 steps"}, id="norms without a record"),
    ],
)
def test_callbacks_add_to_records_what_they_would_have(
    make: Callable[[], Callback], options: dict[str, Any], tmp_path: Path
) -> None:
    expected, found = both(
        tmp_path, Scalar, lambda: ones(7), 2, ones(2), in_validation="val_every" in options,
        make_callbacks=lambda: [make()], **options,
    )  # fmt: skip
    assert expected[1] == found[1]


def test_a_loss_that_was_bad_before_the_save_is_reported_by_the_next_leg(tmp_path: Path) -> None:
    guard = NaNGuard(every="50 steps", locate=False)
    saving = Watch(batch_end=lambda t, *_: t.save_state(tmp_path / "saved") if t.state.micro_step == 3 else None)
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer(callbacks=[guard, saving]).fit(Scalar(), batches(1, 1, math.nan, 1, 1))
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer(callbacks=[NaNGuard(every="50 steps", locate=False)]).fit(
            Scalar(), batches(1, 1, math.nan, 1, 1), resume_from=tmp_path / "saved"
        )


class Gathers(Scalar):
    """Manual optimization that steps in every third micro-batch."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward((self.w * batch).mean())
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("in_validation", [False, True])
def test_gradients_that_a_manual_task_has_gathered(in_validation: bool, tmp_path: Path) -> None:
    data = batches(1, 2, 4, 8, 16, 32)
    expected, found = both(
        tmp_path, Gathers, lambda: data, 2, ones(2), in_validation=in_validation, val_every="2 batches"
    )
    assert expected[0].value == found[0].value == -63
    process = open_checkpoint(tmp_path / "saved").tree("process-00000")
    assert {name: value.item() for name, value in process["gradients"].items()} == {"w": 3}


def test_gradients_that_were_stepped_on_are_not_kept(tmp_path: Path) -> None:
    class ClearsFirst(Gathers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.w * batch).mean())
            optimizer.step()

    found = trainer()
    found.fit(ClearsFirst(), ones(2))
    found.save_state(tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").tree("process-00000")["gradients"] == {}


def gathered_by_two(folder: str, resumes: bool) -> float:
    task = Gathers()
    callbacks = [] if resumes else [Leaves(2, Path(folder, "saved"))]
    found = trainer(callbacks=callbacks, strategy="ddp", project_dir=folder, name="run")
    found.fit(task, batches(*range(1, 13)), resume_from=Path(folder, "saved") if resumes else None)
    return task.value


def test_two_processes_keep_the_gradients_that_each_has_gathered(two_processes: Any, tmp_path: Path) -> None:
    two_processes(gathered_by_two, str(tmp_path), False)
    found = two_processes(gathered_by_two, str(tmp_path), True)
    assert found == [-39.0, -39.0]  # 1 to 12, of which two are averaged in each micro-batch


def test_a_validation_that_was_cut_leaves_nothing_in_torchmetrics_objects(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(batch)
            self.log("val", self.mean)

    expected, found = both(
        tmp_path, Measured, lambda: ones(4), 2, batches(1, 2, 6), in_validation=True, val_every="2 steps"
    )
    assert expected[1] == found[1]
    assert '"val": 3.0' in found[1][0]


class Validated(Loss):
    """Logs a mean over each epoch, and in validation."""

    def __init__(self) -> None:
        super().__init__(on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch.mean())


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("monitor", ["val", "loss"])
@pytest.mark.parametrize("make", [EarlyStopping, lambda monitor: ModelCheckpoint(monitor=monitor)])
def test_a_validation_at_an_epochs_end_may_be_cut_short(
    make: Callable[[str], Callback], monitor: str, at: int, tmp_path: Path
) -> None:
    """What is monitored is not there yet, which is no error; and the epoch's record comes behind the validation."""
    options: dict[str, Any] = {"in_validation": True, "make_callbacks": lambda: [make(monitor)], "max_epochs": 2}
    expected, found = both(tmp_path, Validated, lambda: ones(3), at, ones(2), **options)
    assert expected[1] == found[1]
    assert [("val" in row, "loss" in row) for row in found[1]] == [(True, False), (False, True)] * 2


def test_what_an_epochs_start_logs_weighs_the_same(tmp_path: Path) -> None:
    def log(trainer: Any, task: Any) -> None:
        trainer.log("index", float(trainer.state.epoch), on_step=True, on_epoch=False)

    expected, found = both(
        tmp_path, Scalar, lambda: [torch.ones(3)] * 2, 4, max_epochs=4, accumulate=4, accumulate_across_epochs="carry",
        make_callbacks=lambda: [Watch(epoch_start=log)], log_every=1, val_every="never",
    )  # fmt: skip
    assert expected[1] == found[1]


class Noisy(IterableDataset[Any]):
    """Goes on where it was, over passes that end early as well; each sample is drawn."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[float]:
        while self.place < 100:
            self.place += 1
            yield self.place + random.random()

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_that_a_limit_cuts_draws_on_as_it_would_have(tmp_path: Path) -> None:
    expected, found = both(
        tmp_path, Scalar, lambda: DataLoader(Noisy(), batch_size=2), 4, max_epochs=4, limit_batches=2, log_every=1
    )
    assert expected[0].value == found[0].value


def test_a_window_that_only_the_runs_end_closed_is_said_to_be_inexact(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate": 2, "accumulate_across_epochs": "carry"}
    trainer(callbacks=[Leaves(3, tmp_path / "saved")], **options).fit(Scalar(), ones(3))
    with pytest.warns(UserWarning, match="the run's end stepped on an accumulation window"):
        trainer(**options).fit(Scalar(), ones(3), resume_from=tmp_path / "saved")


def test_batches_that_are_taken_anew_are_said_to_be_inexact(tmp_path: Path) -> None:
    data = DataLoader(torch.arange(8.0), shuffle=True)
    trainer(overfit_batches=2, callbacks=[Leaves(2, tmp_path / "saved")]).fit(Scalar(), data)
    with pytest.warns(UserWarning, match="overfit_batches takes the loader's first batches anew"):
        trainer(overfit_batches=2, max_epochs=2).fit(Scalar(), data, resume_from=tmp_path / "saved")


class TestAfterTheLastBoundary:
    """A checkpoint that is asked for when no boundary comes any more is written at once, and whole on return."""

    def test_at_teardown(self, tmp_path: Path) -> None:
        saved = []
        callback = Watch(
            teardown=lambda trainer, task: trainer.save_state(tmp_path / "saved", asynchronous=True),
            saved=lambda trainer, task, path: saved.append(path),
        )
        trainer(callbacks=callback).fit(Scalar(), ones(2))
        assert [each.path for each in find_checkpoints(tmp_path)] == saved == [tmp_path / "saved"]

    def test_after_fit(self, tmp_path: Path) -> None:
        found = trainer()
        found.fit(Scalar(), ones(2))
        assert open_checkpoint(found.save_state(tmp_path / "saved", asynchronous=True)).manifest.progress["step"] == 2

    def test_when_the_last_one_of_the_background_is_whole(self, tmp_path: Path) -> None:
        def again(trainer: Any, task: Any, path: Path) -> None:
            if path.name == "first":
                trainer.save_state(tmp_path / "second")

        found = trainer(
            callbacks=Watch(stop=lambda t, _: t.save_state(tmp_path / "first", asynchronous=True), saved=again)
        )
        found.fit(Scalar(), ones(2))
        assert [each.path.name for each in find_checkpoints(tmp_path)] == ["first", "second"]


def test_another_precision_begins_with_a_new_scale(tmp_path: Path) -> None:
    trainer(callbacks=[Leaves(2, tmp_path / "saved")]).fit(Scalar(), ones(4))
    with pytest.warns(UserWarning, match="precision was 'no' and is 'fp16'"):
        trainer(precision="fp16").fit(Scalar(), ones(4), resume_from=tmp_path / "saved")


def test_a_stop_in_the_last_on_saved_ends_nothing_any_more(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise StopRun("saved")

    found = trainer(callbacks=Watch(stop=lambda t, _: t.save_state(tmp_path / "saved", asynchronous=True), saved=stop))
    found.fit(Scalar(), ones(2))
    assert found.state.step == 2


class Fails(Callback):
    """Its state can't be told, or not taken back."""

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves

    def state_dict(self) -> dict[str, Any]:
        if not self.saves:
            raise ValueError("no state")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no such state")


def test_what_a_callbacks_state_raises_says_whose_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no state") as saving:
        trainer(callbacks=[Fails(saves=False), Leaves(1, tmp_path / "saved")]).fit(Scalar(), ones(2))
    assert saving.value.__notes__[0] == "raised by Fails.state_dict"
    trainer(callbacks=[Fails(saves=True), Leaves(1, tmp_path / "saved")]).fit(Scalar(), ones(2))
    with pytest.raises(ValueError, match="no such state") as loading:
        trainer(callbacks=Fails(saves=True)).fit(Scalar(), ones(2), resume_from=tmp_path / "saved")
    assert loading.value.__notes__[0] == "raised by Fails.load_state_dict"


def saved_apart(folder: str) -> str:
    def save(trainer: Any, task: Any) -> None:
        trainer.save_state(Path(folder, f"of-{trainer.process.process_index}"))

    try:
        trainer(strategy="ddp", callbacks=Watch(stop=save), project_dir=folder).fit(Scalar(), ones(4))
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_processes_that_name_different_paths_save_nothing(two_processes: Any, tmp_path: Path) -> None:
    for text in two_processes(saved_apart, str(tmp_path)):
        assert "save to different paths" in text
        assert "of-0, " in text
    assert list(tmp_path.iterdir()) == []


class Moving(Scalar):
    """Its forward pass reads a buffer that each process changes by its own data; gradients are taken by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean.mul_(0.5).add_(batch.mean())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.w * self.mean * batch).mean())
        optimizer.step()


def moved(folder: str, at: int | None, resumes: bool) -> tuple[float, float]:
    task, path = Moving(), Path(folder, "saved")
    found = trainer(callbacks=[] if at is None else [Leaves(at, path)], strategy="ddp", project_dir=folder, name="run")
    found.fit(task, batches(*range(1, 13)), resume_from=path if resumes else None)
    return task.value, task.mean.item()


def test_two_processes_keep_the_buffers_that_each_has_changed(two_processes: Any, tmp_path: Path) -> None:
    expected = two_processes(moved, str(tmp_path / "whole"), None, False)
    two_processes(moved, str(tmp_path / "legs"), 3, False)
    assert two_processes(moved, str(tmp_path / "legs"), None, True) == expected
    assert expected[0] != expected[1]


class Cut(Scalar):
    """Ends its first epoch in the middle of a window, and counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        if self.trainer.state.epoch == 0:
            raise EndEpoch
        return super().training_step(batch, batch_idx)


def test_the_window_behind_one_that_was_cut_has_its_own_copies_of_buffers() -> None:
    """`NaNGuard` puts them back to where the bad window began, and not to where one before it did."""
    task = Cut()
    with pytest.warns(UserWarning, match="NaNGuard skips a step"):
        trainer(max_epochs=2, accumulate=2, callbacks=NaNGuard("skip", locate=False)).fit(task, batches(math.nan, 1))
    assert task.count == 1  # of the first epoch; the window of the bad micro-batch is put back as a whole


def test_a_stop_in_validation_loses_no_batch_of_a_carried_window(tmp_path: Path) -> None:
    """The run's end steps on it, and says that this is inexact."""
    options: dict[str, Any] = {"max_epochs": 2, "accumulate": 2, "accumulate_across_epochs": "carry"}
    data = batches(1, 2, 4)
    task = Scalar()
    leaves = Leaves(3, tmp_path / "saved", in_validation=True)
    trainer(callbacks=[leaves], **options).fit(task, data, ones(2))
    assert task.value == -(1 + 2) / 2 - 4
    task = Scalar()
    with pytest.warns(UserWarning, match="the run's end stepped on an accumulation window"):
        trainer(**options).fit(task, data, ones(2), resume_from=tmp_path / "saved")
    assert task.value == -(1 + 2) / 2 - 4 - (1 + 2) / 2 - 4
