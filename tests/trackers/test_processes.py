"""Trackers on two processes: the main one alone opens a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopwright.trackers.general import GeneralTracker, on_main_process
from loopwright.trackers.tracker import RunInfo, Status, Tracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]


class Spy(Tracker):
    """Notes what it is called with; fails where it is told to."""

    name = "spy"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[Any] = []

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        self.calls.append(("start", str(run.directory), config["task"]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", step, dict(metrics)))
        if self.fails:
            raise OSError("the server is down")

    def finish(self, status: Status) -> None:
        self.calls.append(("finish", status))


class Ranked(Task):
    """Each process logs a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.hparams["api_key"] = "hunter2"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer is not None
        index = self.trainer.process.process_index
        self.log("mean", float(index))
        self.log("own", float(index), sync=False)
        if index == 1:
            self.log("second", 7.0, sync=False)
        return self.w * batch.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _fit(fails: bool) -> tuple[list[Any], dict[str, float], list[str]]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("loopwright.trackers.group"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        spy = Spy(fails)
        trainer = Trainer(max_epochs=1, trackers=spy, progress=False, log_every=1)
        trainer.fit(Ranked(), [torch.ones(2)] * 4)
    finally:
        logger.removeHandler(handler)
    return spy.calls, trainer.metrics, messages


def test_b71_only_the_main_process_opens_a_run(two_processes: Run) -> None:
    (calls, metrics, _), (nothing, others, _) = two_processes(_fit, False)
    assert nothing == []
    assert [call[0] for call in calls] == ["start", "log", "log", "finish"]
    assert calls[0][2] == {"class": "Ranked", "api_key": "***"}
    assert [(step, record["mean"], record["own"], record["second"]) for _, step, record in calls[1:3]] == [
        (1, 0.5, 0.0, 7.0), (2, 0.5, 0.0, 7.0),
    ]  # fmt: skip
    assert metrics == others


def test_a_failing_tracker_is_reported_once(two_processes: Run) -> None:
    (calls, _, messages), (_, _, nothing) = two_processes(_fit, True)
    assert [call[0] for call in calls] == ["start", "log", "log", "finish"]
    assert len(messages) == 1
    assert "the server is down" in messages[0]
    assert nothing == []


def _files(word: str) -> tuple[str, list[str]]:
    trainer = Trainer(max_epochs=1, trackers=word, progress=False, log_every=1)
    trainer.fit(Ranked(), [torch.ones(2)] * 4)
    trainer.process.wait_for_everyone()
    return str(trainer.run_directory), sorted(path.name for path in Path("runs").rglob("*.*"))


def test_one_run_is_written(two_processes: Run) -> None:
    first, second = two_processes(_files, "csv")
    assert first == second
    assert first[1] == ["metrics.csv", "metrics.run.json"]


class Own(GeneralTracker):
    """As for Accelerate."""

    name = "own"
    calls = 0

    @on_main_process
    def count(self) -> None:
        self.calls += 1


def _decorated() -> int:
    tracker = Own()
    tracker.count()
    return tracker.calls


def test_methods_of_accelerates_trackers_run_on_the_main_process(two_processes: Run) -> None:
    assert two_processes(_decorated) == [1, 0]
