"""The built-in callbacks on two processes."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.callbacks.garbage import GarbageCollection
from loopwright.callbacks.gradients import GradientMonitor
from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.callbacks.preemption import Preemption
from loopwright.callbacks.progress import ProgressBar
from loopwright.callbacks.summary import ModelSummary
from loopwright.callbacks.throughput import ThroughputMonitor
from loopwright.callbacks.timer import Timer
from loopwright.checkpoint.claims import FolderClaim
from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.distributed.slots import channel
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]
STEERS = [
    (ProgressBar, False), (LearningRateMonitor, False), (ModelSummary, False), (ThroughputMonitor, False),
    (GarbageCollection, False), (GradientMonitor, False), (Timer, False), (Preemption, False),
    (lambda: ModelCheckpoint(save_weights_only=True), False),
    (lambda: Timer("1 h"), False), (NaNGuard, False), (lambda: NaNGuard("skip"), True),
    (lambda: NaNGuard("stop"), True), (lambda: EarlyStopping("val"), True), (Callback, True),
]  # fmt: skip


class Normed(Task):
    """Has buffers, and a loss that is the weight times the mean of the batch. The value of validation is scripted."""

    def __init__(self, values: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.values = values
        self.num_validations = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.norm(batch[0])
        self.log("train/loss", 1.0)
        return self.w * batch[0].mean()

    def next_value(self) -> float:
        self.num_validations += 1
        return self.values[self.num_validations]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.next_value())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def numbers(*values: float, batch_size: int = 2) -> Any:
    """A loader of numbers, in order: of each four in turn, process 0 gets the first two."""
    return DataLoader(TensorDataset(torch.tensor(values).view(-1, 1)), batch_size=batch_size)


ONES = (1.0,) * 8
BAD = (*ONES[:6], float("nan"), 1.0, *ONES)
"""The second batch of process 1 is not finite."""


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    given = {"max_epochs": 1, "trackers": False, "progress": False, "project_dir": "runs", **options}
    return Trainer(callbacks=list(callbacks), sanity_val_batches=0, **given)


@pytest.mark.parametrize(("make", "steers"), STEERS)
def test_steers(make: Callable[[], Callback], steers: bool) -> None:
    assert make().steers is steers


def _messages(with_callbacks: bool, epochs: int) -> int:
    made = [make() for make, steers in STEERS if not steers and make is not ProgressBar] if with_callbacks else []
    trainer = make_trainer(*made, max_epochs=epochs, log_every="never", val_every="never")
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(Normed(), numbers(*ONES))  # where optimizers and groups are made
        before = channel().num_sent
        trainer.fit(Normed(), numbers(*ONES))
    return channel().num_sent - before


def test_callbacks_that_do_not_steer_cost_no_message_per_step(two_processes: Run) -> None:
    count = {(given, n): two_processes(_messages, given, n)[0] for given in (False, True) for n in (1, 3)}
    # Per epoch `ModelCheckpoint` tells the others of one file, and that it is whole.
    assert count[True, 3] - count[True, 1] == count[False, 3] - count[False, 1] + 2 * 2


class Watch(Callback):
    """Keeps the paths at each validation's end, and whether the files are there."""

    def __init__(self, saver: ModelCheckpoint) -> None:
        self.saver = saver
        self.seen: list[Any] = []

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        paths = [path for path in (self.saver.best_path, self.saver.last_path) if path is not None]
        self.seen.append([(path.name, path.exists()) for path in paths])


def _checkpoints(weights_only: bool, asynchronous: bool | None) -> dict[str, Any]:
    saver = ModelCheckpoint(
        every="1 epoch", monitor="val", top_k=2, save_weights_only=weights_only, asynchronous=asynchronous
    )
    watch = Watch(saver)
    trainer = make_trainer(saver, watch, max_epochs=4)
    task = Normed((3.0, 1.0, float("nan"), 2.0))
    trainer.fit(task, numbers(*ONES[:4]), numbers(1.0, 1.0, 1.0, batch_size=8))
    folder = trainer.run_directory / "checkpoints"
    return {
        "state": saver.state_dict(),
        "score": saver.best_score,
        "seen": watch.seen,
        "files": sorted(
            path.name for path in folder.iterdir() if path.name != ".claim"
        ),  # the main process may hold it
        "best": load_weights(task, saver.best_path or "") and task.w.item(),
    }


def test_checkpoints_are_written_once_and_known_everywhere(two_processes: Run) -> None:
    first, second = two_processes(_checkpoints, True, None)
    assert first == second
    assert first["score"] == 1.0
    assert first["files"] == ["last.safetensors", "step=2-val=1.safetensors", "step=4-val=2.safetensors"]
    assert all(is_there for seen in first["seen"] for _, is_there in seen)
    assert first["seen"][1] == [("step=1-val=3.safetensors", True), ("last.safetensors", True)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_whole_states_are_written_once_and_known_everywhere(two_processes: Run, asynchronous: bool) -> None:
    first, second = two_processes(_checkpoints, False, asynchronous)
    for what in ("state", "score", "best"):
        assert first[what] == second[what]
    assert first["score"] == 1.0
    assert first["files"] == ["step=000002", "step=000004"]  # of the main process, which removes the others
    if not asynchronous:
        assert first["seen"] == second["seen"]


def _goes_on() -> tuple[list[str], list[str], str | None]:
    for step in (3, 4):
        files = ModelCheckpoint("1 step", top_k=-1, filename="{step}", save_weights_only=True, directory="files")
        states = ModelCheckpoint("1 step", top_k=-1, directory="states")
        trainer = make_trainer(files, states, max_epochs=4, max_steps=step, name="run")
        trainer.fit(Normed(), numbers(*ONES), resume_from="latest")
        if trainer.process.is_main_process and step == 3:
            shutil.rmtree("states/step=000003")  # as if the run had been killed before
        trainer.process.wait_for_everyone()
    found = sorted(path.name for path in Path("files").iterdir() if path.name != ".claim")
    return found, [path.path.name for path in files.kept], str(files.last_path)


def test_files_of_a_killed_leg_are_written_anew(two_processes: Run) -> None:
    first, second = two_processes(_goes_on)
    assert first == second
    assert first[0] == ["last.safetensors", *(f"step={step}.safetensors" for step in (1, 2, 3, 4))]
    assert first[1] == [f"step={step}.safetensors" for step in (4, 3, 2, 1)]


class Blocks(Callback):
    """Puts a file where the folder of the checkpoints is to be, on one process: nothing can be written there."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        folder = trainer.run_directory / "checkpoints"
        if trainer.process.is_main_process:
            shutil.rmtree(folder)
            folder.write_text("no folder")


def _blocked(every: str, weights_only: bool) -> tuple[str, str, int]:
    saver = ModelCheckpoint(every=every, save_on_exception=False, save_weights_only=weights_only)
    trainer = make_trainer(Blocks(), saver, max_steps=1)
    try:
        trainer.fit(Normed(), numbers(*ONES))
    except CheckpointError as error:
        return type(error).__name__, str(error), trainer.state.step
    return "none", "", trainer.state.step


@pytest.mark.parametrize("every", ["1 step", "last"])  # in training, and where nothing follows any more
@pytest.mark.parametrize("weights_only", [True, False])
def test_an_error_in_writing_ends_all(two_processes: Run, every: str, weights_only: bool) -> None:
    first, second = two_processes(_blocked, every, weights_only)
    assert first == second
    assert first[0] == "CheckpointError"
    assert "ModelCheckpoint could not write " in first[1] or not weights_only
    assert "checkpoints" in first[1]


def _claimed() -> str:
    trainer = make_trainer(ModelCheckpoint(directory="out"))
    claim = FolderClaim(Path("out").absolute(), "other") if trainer.process.is_main_process else None
    try:
        trainer.fit(Normed(), numbers(*ONES))
    except CheckpointError as error:
        return str(error)
    finally:
        if claim is not None:
            claim.release()
    return "none"


def test_a_folder_of_another_run_ends_all(two_processes: Run) -> None:
    first, second = two_processes(_claimed)
    assert first == second
    assert "another run writes into " in first


def _bad_buffer(weights_only: bool) -> tuple[Any, list[str]]:
    task = Normed()
    saver = ModelCheckpoint(save_weights_only=weights_only)

    class Poison(Callback):
        steers = False

        def on_epoch_end(self, trainer: Any, task: Any, metrics: Any) -> None:
            if not trainer.process.is_main_process:
                task.norm.running_mean.fill_(float("nan"))  # not reduced: process 0's count

    trainer = make_trainer(Poison(), saver)
    with warnings.catch_warnings(record=True) as caught:
        trainer.fit(task, numbers(*ONES))
    return saver.last_path, [str(each.message) for each in caught]


@pytest.mark.parametrize(("weights_only", "name"), [(True, "last.safetensors"), (False, "step=000002")])
def test_the_main_process_decides_what_is_finite(two_processes: Run, weights_only: bool, name: str) -> None:
    first, second = two_processes(_bad_buffer, weights_only)
    assert first == second
    assert first[0].name == name


def _stopping() -> tuple[Any, ...]:
    stopping = EarlyStopping("val", patience=2)
    trainer = make_trainer(stopping, max_epochs=9)
    trainer.fit(Normed((3.0, 2.0, 2.5, 2.5, 1.0)), numbers(*ONES[:4]), numbers(1.0, batch_size=1))
    return trainer.state.step, trainer.stop_reason, stopping.best_score, stopping.wait


def test_early_stopping_is_alike(two_processes: Run) -> None:
    first, second = two_processes(_stopping)
    assert first == second
    assert first == (4, "EarlyStopping: val has not improved in 2 checks; the best was 2 at step 2", 2.0, 2)


def _guarded(policy: Any) -> tuple[Any, ...]:
    guard = NaNGuard(policy)
    trainer = make_trainer(guard, accumulate=1)
    task = Normed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(task, numbers(*BAD))
    text = str(trainer.stop_reason)
    state = trainer.state
    messages = [str(each.message) for each in caught if "NaNGuard" in str(each.message)]
    return state.step, state.skipped_steps, guard.nonfinite_steps, task.w.item(), text, messages


def test_a_bad_batch_of_one_process_is_skipped_by_all(two_processes: Run) -> None:
    first, second = two_processes(_guarded, "skip")
    assert first[:4] == second[:4] == (3, 1, 1, -3.0)
    assert first[5] == []
    (message,) = second[5]
    assert "the loss is nan at step 2 (epoch 0, batch 1 of process 1)" in message
    assert "The first module with a bad output is 'norm'" in message


def test_a_bad_batch_of_one_process_stops_all(two_processes: Run) -> None:
    first, second = two_processes(_guarded, "stop")
    assert first[:2] == second[:2] == (1, 0)
    assert "NaNGuard: the loss is nan at step 2" in first[4]
    assert "NaNGuard: the loss is nan at step 2" in second[4]


def _fails() -> None:
    make_trainer(NaNGuard()).fit(Normed(), numbers(*BAD))


def test_a_bad_batch_of_one_process_is_an_error_for_all(two_processes: Run) -> None:
    says = r"NonFiniteError: the loss is nan at step 2 \(epoch 0, batch 1 of process 1\)"
    with pytest.raises(AssertionError, match=says) as failed:
        two_processes(_fails)
    assert "PeerFailedError: process 1 failed first" in str(failed.value)


class Slow(Callback):
    """Takes its time on one process, whose clock then says first that the time is over."""

    steers = False

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.process.process_index == 1:
            self.timer._seconds["fit"] = 3600.0


def _timed() -> tuple[int, str]:
    timer = Timer("1 h")
    trainer = make_trainer(Slow(timer), timer)
    trainer.fit(Normed(), numbers(*ONES, *ONES, *ONES))
    return trainer.state.step, str(trainer.stop_reason)


def test_the_timer_of_one_process_ends_all(two_processes: Run) -> None:
    first, second = two_processes(_timed)
    assert first == second
    assert first == (3, "process 1: Timer: the run has taken 1:00:00, its limit is 3600 seconds")


def _shown() -> tuple[str, dict[str, float]]:
    stream = io.StringIO()
    bar = ProgressBar(style="lines", every="1 epoch", stream=stream)
    trainer = make_trainer(
        bar, ModelSummary(), ThroughputMonitor(), LearningRateMonitor(), GradientMonitor("1 step"), log_every=1
    )
    with contextlib.redirect_stderr(stream):
        trainer.fit(Normed(), numbers(*ONES))
    return stream.getvalue(), trainer.metrics


def test_the_main_process_shows_what_is_of_all(two_processes: Run) -> None:
    (shown, metrics), (nothing, others) = two_processes(_shown)
    assert nothing == ""
    assert shown.splitlines()[0] == "Normed"  # not its wrapper
    assert sum("step 2" in line for line in shown.splitlines()) == 1
    pace = {name.removeprefix("throughput/"): value for name, value in metrics.items() if name.startswith("through")}
    assert pace["samples_per_second"] == pytest.approx(4 * pace["steps_per_second"])  # two of each process
    assert (metrics["lr"], metrics["grad_norm"]) == (1.0, 1.0)
    assert (others["lr"], others["grad_norm"]) == (1.0, 1.0)


def _called() -> list[int]:
    calls: list[int] = []
    trainer = make_trainer(max_epochs=2)
    trainer.on("step", lambda trainer, task, outcome: calls.append(trainer.state.step), every=2)
    trainer.on("batch_end", lambda trainer, *_: calls.append(trainer.state.samples), every="8 samples")
    trainer.fit(Normed(), numbers(*ONES))
    return calls


def _votes(steers: bool) -> tuple[int, str]:
    trainer = make_trainer(max_epochs=2, log_every="never", val_every="never")
    trainer.on("step", lambda *_: None, steers=steers)
    trainer.fit(Normed(), numbers(*ONES))  # where optimizers and groups are made
    before = channel().num_sent
    trainer.fit(Normed(), numbers(*ONES))
    count = channel().num_sent - before
    trainer = make_trainer()
    trainer.on("before_step", skip, steers=steers)
    try:
        trainer.fit(Normed(), numbers(*ONES))
    except ConfigError as error:
        return count, str(error)
    return count, f"{trainer.state.step} steps"


def skip(*_: Any) -> None:
    raise SkipBatch


def test_functions_that_do_not_steer_cost_no_message_per_step(two_processes: Run) -> None:
    (steering, skipped), (free, refused) = two_processes(_votes, True)[0], two_processes(_votes, False)[0]
    assert steering - free == 4  # one per step
    assert skipped == "0 steps"
    assert "SkipBatch was raised before a step by a callback or function with steers=False" in refused


def test_functions_count_alike(two_processes: Run) -> None:
    assert two_processes(_called) == [[2, 8, 4, 16]] * 2


def _saved(everywhere: bool) -> list[str]:
    trainer = make_trainer()
    trainer.fit(Normed(), numbers(*ONES))
    folder = Path("everywhere" if everywhere else "main")
    if everywhere or trainer.process.is_main_process:
        assert trainer.save_model(folder) == folder / "model.safetensors"
    trainer.process.wait_for_everyone()
    load_weights(Normed(), folder)
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_model_is_saved_once(two_processes: Run, everywhere: bool) -> None:
    assert two_processes(_saved, everywhere) == [["model.safetensors"]] * 2
