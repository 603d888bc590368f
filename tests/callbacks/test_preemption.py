"""Signals that end a training in order: who hears them, what is saved, and what follows."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.preemption import Preemption
from loopwright.checkpoint.finding import newest
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.trainer import Trainer

from .counting import Counting, batches, states

Run = Callable[..., list[Any]]


class Sends(Callback):
    """Sends this process a signal, at an event of a step."""

    before = ("ModelCheckpoint",)

    def __init__(self, name: str, step: int, event: str = "on_batch_end") -> None:
        self.number, self.step, self.event = signal.Signals[name], step, event

    def send(self, trainer: Any, event: str) -> None:
        if trainer.state.step == self.step and self.event == event:
            self.event = ""
            os.kill(os.getpid(), self.number)

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        self.send(trainer, "on_batch_end")

    def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        self.send(trainer, "on_validation_batch_end")

    def on_save_state(self, trainer: Any, task: Any, state: Any) -> None:
        self.send(trainer, "on_save_state")


def fit(callbacks: Sequence[Callback], *, resume_from: Any = None, **arguments: Any) -> tuple[Trainer, Counting]:
    """Two epochs of four steps, each with a validation of three batches."""
    options = {"max_epochs": 2, "trackers": False, "progress": False, "name": "run", "sanity_val_batches": 0}
    trainer = Trainer(callbacks=callbacks, **options | arguments)  # type: ignore[arg-type]
    task = Counting([1.0] * 100)
    trainer.fit(task, batches(4), batches(3), resume_from=resume_from)
    return trainer, task


def code_of(callbacks: Sequence[Callback], **arguments: Any) -> Any:
    """The exit code with which a fit ends its process."""
    with pytest.raises(SystemExit) as caught:
        fit(callbacks, **arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "event", "step", "code"),
    [
        ("SIGTERM", "on_batch_end", 3, 143),
        ("SIGUSR1", "on_batch_end", 3, 138),
        ("SIGUSR2", "on_validation_batch_end", 4, 140),
        ("SIGUSR1", "on_save_state", 4, 138),
    ],
)
def test_pain_21_a_signal_ends_the_run_at_a_boundary_with_one_whole_checkpoint(
    tmp_path: Path, name: str, event: str, step: int, code: int
) -> None:
    callbacks = [Sends(name, step, event), ModelCheckpoint(directory="out"), Preemption(("SIGUSR1", "SIGUSR2"))]
    assert code_of(callbacks) == code
    assert states(tmp_path / "out") == {f"step={step:06d}": -float(step)}
    _, task = fit([ModelCheckpoint(directory="out")], resume_from="latest")
    assert task.w.item() == -8.0
    assert states(tmp_path / "out") == {"step=000008": -8.0}


def test_validation_that_was_cut_is_done_again_after_the_resume(tmp_path: Path) -> None:
    assert code_of([Sends("SIGTERM", 4, "on_validation_batch_end"), ModelCheckpoint(directory="out")]) == 143
    _, task = fit([ModelCheckpoint(directory="out")], resume_from="latest")
    assert task.num_validations == 6  # three batches at each of the two epochs' ends


class Tiny(Counting):
    """Its process of index 1 gets the signal."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.process.process_index == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR2)
        return self.w * batch[0].mean()


def _signalled() -> tuple[Any, ...]:
    saver = ModelCheckpoint(directory="out")
    callbacks = [saver, Preemption("SIGUSR2", grace="5 min")]
    trainer = Trainer(callbacks=callbacks, max_epochs=1, trackers=False, progress=False)
    data = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=1)
    try:
        trainer.fit(Tiny(), data)
    except SystemExit as end:
        return end.code, trainer.signal, trainer.state.step, trainer.stop_reason, str(saver.last_path)
    return ("no end",)


def test_pain_21_a_signal_to_one_process_ends_both_at_the_same_step(two_processes: Run, tmp_path: Path) -> None:
    first, second = two_processes(_signalled)
    assert first == second
    assert first[:3] == (140, "SIGUSR2", 3)
    assert first[3] == "process 1: SIGUSR2: the process was asked to end"
    assert states(tmp_path / "out") == {"step=000003": -3.0}
    found = newest(tmp_path / "out")
    assert found is not None and found.manifest.world_size == 2


class TestGrace:
    def test_too_short_for_a_whole_checkpoint_by_the_measured_time_leaves_the_weights(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        callbacks = [Sends("SIGTERM", 3), ModelCheckpoint(2, directory="out"), Preemption(grace=1e-6)]
        with caplog.at_level(logging.WARNING, "loopwright"):
            assert code_of(callbacks) == 143
        assert "SIGTERM: -0.0 s were left, and a whole checkpoint takes 0." in caplog.text
        assert sorted(os.listdir("out")) == ["step=000002", "step=000003-weights.safetensors"]
        _, task = fit([ModelCheckpoint(directory="out")], resume_from="latest")  # from step 2
        assert task.w.item() == -8.0

    def test_what_was_asked_for_at_the_same_boundary_is_not_saved_either(self, tmp_path: Path) -> None:
        callbacks = [Sends("SIGTERM", 4), ModelCheckpoint(2, directory="out"), Preemption(grace=1e-6)]
        assert code_of(callbacks) == 143
        assert sorted(os.listdir("out")) == ["step=000002", "step=000004-weights.safetensors"]

    @pytest.mark.parametrize("every", [2, "never"])  # measured before, and by the weights
    def test_long_enough_saves_all_and_leaves_no_file_of_weights(self, tmp_path: Path, every: Any) -> None:
        assert code_of([Sends("SIGTERM", 3), ModelCheckpoint(every, directory="out"), Preemption(grace="5 min")]) == 143
        assert states(tmp_path / "out") == {"step=000003": -3.0}

    def test_without_a_measure_the_weights_come_first(self) -> None:
        code_of([Sends("SIGTERM", 3), ModelCheckpoint("never", directory="out"), Preemption(grace=1e-6)])
        assert os.listdir("out") == ["step=000003-weights.safetensors"]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the calls of an executable named scontrol, which stands in for SLURM's; it fails for job 13."""
    tool, calls = tmp_path / "bin/scontrol", tmp_path / "calls"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nls -d out/* >> {calls}\necho "$@" >> {calls}\n[ "$2" != 13 ] || exec ls /nowhere\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return calls


class TestRequeueWithAnExecutableThatStandsInForSlurm:
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_the_job_is_requeued_once_the_checkpoint_is_whole(self, scontrol: Path, asynchronous: bool) -> None:
        saver = ModelCheckpoint(directory="out", asynchronous=asynchronous)
        assert code_of([Sends("SIGUSR1", 3), saver, Preemption()]) == 138
        assert scontrol.read_text().splitlines() == ["out/step=000003", "requeue 4711"]

    def test_not_for_sigterm_nor_when_told_not_to(self, scontrol: Path) -> None:
        assert code_of([Sends("SIGTERM", 3), ModelCheckpoint(directory="out"), Preemption()]) == 143
        assert code_of([Sends("SIGUSR1", 3), ModelCheckpoint(directory="two"), Preemption(requeue=False)]) == 138
        fit([ModelCheckpoint(directory="three"), Preemption()])
        assert not scontrol.exists()

    def test_sigterm_after_the_warning_changes_nothing(self, scontrol: Path) -> None:
        """As at the limit of the time, where the save took longer than the warning came before it."""
        callbacks = [Sends("SIGUSR1", 3), Sends("SIGTERM", 3, "on_save_state")]
        assert code_of([*callbacks, ModelCheckpoint(directory="out"), Preemption()]) == 138
        assert scontrol.read_text().splitlines() == ["out/step=000003", "requeue 4711"]

    def test_not_without_a_checkpoint_to_go_on_from(self, scontrol: Path) -> None:
        saver = ModelCheckpoint("never", last=False, top_k=-1)
        with pytest.warns(UserWarning, match="the job is not requeued, since there is no checkpoint"):
            assert code_of([Sends("SIGUSR1", 3), saver, Preemption()]) == 138
        assert not scontrol.exists()

    def test_a_failure_is_told(self, scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "13")
        with pytest.warns(UserWarning, match="scontrol requeue 13' failed, exit code 2: .*nowhere.* submit the job ag"):
            assert code_of([Sends("SIGUSR1", 3), ModelCheckpoint(directory="out"), Preemption()]) == 138

    def test_asked_for_where_it_can_not_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match=r"no SLURM_JOB_ID, so that no job can be requeued. Leave it 'auto'"):
            fit([Preemption(requeue=True)])
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(ConfigError, match="no 'scontrol' on PATH"):
            fit([Preemption(requeue=True)])


def test_a_run_that_nothing_saves_is_warned_of_when_it_begins() -> None:
    with pytest.warns(UserWarning, match=r"Preemption: nothing will be saved when .* Add ModelCheckpoint\(\) to"):
        fit([Preemption()])


def test_a_function_that_saves_where_the_run_stops_is_enough(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[Preemption(), Sends("SIGUSR1", 3)], max_epochs=1, trackers=False, progress=False)
    trainer.on("stop", lambda trainer, task: trainer.save_state("mine"))
    with pytest.raises(SystemExit, match="138"):
        trainer.fit(Counting(), batches(4))
    assert states(tmp_path) == {"mine": -3.0}


class Forks(Callback):
    """Forks a process in the second step, and sends it a signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.code: int | None = None

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2:
            context = multiprocessing.get_context("fork")
            ready, goes_on = context.Event(), context.Event()
            child = context.Process(target=_wait, args=(ready, goes_on))
            child.start()
            ready.wait(10)
            os.kill(child.pid or 0, self.number)
            if self.number == signal.SIGUSR1:
                goes_on.set()
            child.join(10)
            self.code = child.exitcode


def _wait(ready: Any, goes_on: Any) -> None:
    ready.set()
    os._exit(7 if goes_on.wait(10) else 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 7)])
def test_signals_to_forked_workers_save_and_end_nothing(number: int, code: int) -> None:
    forks = Forks(number)
    trainer, task = fit([forks, ModelCheckpoint("never", last=False, top_k=-1, directory="out"), Preemption()])
    assert forks.code == code
    assert (trainer.signal, task.w.item()) == (None, -8.0)
    assert not Path("out").exists()


def test_handlers_of_the_program_stay_and_ours_are_gone_afterwards() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.warns(UserWarning, match="SIGUSR1: the program has a handler of its own for it, which stays"):
            trainer, _ = fit([Sends("SIGUSR1", 3), ModelCheckpoint(), Preemption()])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (seen, trainer.signal, trainer.state.step) == ([signal.SIGUSR1], None, 8)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_outside_of_the_main_thread_it_says_that_it_hears_nothing() -> None:
    texts: list[str] = []

    def work() -> None:
        try:
            fit([ModelCheckpoint(), Preemption()])
        except UserWarning as error:  # an error in these tests
            texts.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert texts == ["SIGUSR1: not heard outside of the main thread."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": "SIGUSR"}, r"Preemption\(signals\): 'SIGUSR'. Did you mean 'SIGUSR"),
        ({"signals": ["SIGKILL"]}, "'SIGKILL'. "),
        ({"grace": "3 steps"}, r"grace='3 steps'\). Expected a time, such as '30 s'"),
        ({"grace": 0}, "is empty or endless"),
        ({"requeue": "yes"}, r"requeue='yes'\). Expected 'auto', True or False"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preemption(**arguments)
