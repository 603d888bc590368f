"""Trackers that were written for Accelerate, as its documentation shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.errors import TrackerError
from loopwright.trackers.csv import CSVTracker
from loopwright.trackers.general import GeneralTracker, on_main_process
from loopwright.trackers.jsonl import JSONLTracker
from loopwright.trackers.mlflow import MLflowTracker
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tensorboard import TensorBoardTracker
from loopwright.trackers.tracker import WORDS_WITH, RunInfo, Tracker
from loopwright.trackers.wandb import WandbTracker


class Documented(GeneralTracker):
    """The example of Accelerate's guide, writing to a list. It doesn't call `super().__init__`."""

    name = "documented"
    requires_logging_directory = False

    @on_main_process
    def __init__(self) -> None:
        self.lines: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.lines.append(("config", values))

    @on_main_process
    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((step, values))


class Lazy(Documented):
    """Opens in `start` and closes in `finish`, which take no arguments in Accelerate."""

    name = "lazy"

    def start(self) -> None:  # type: ignore[override]
        super().start()
        self.lines.append("start")

    def finish(self) -> None:  # type: ignore[override]
        super().finish()
        self.lines.append("finish")


class Lazier(Lazy):
    name = "lazier"

    def start(self) -> None:  # type: ignore[override]
        super().start()
        self.lines.append("again")


RECORDS = [("config", {"lr": 0.5}), (2, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (Documented, RECORDS),
        (Lazy, ["start", *RECORDS, "finish"]),
        (Lazier, ["start", "again", *RECORDS, "finish"]),
    ],
)
def test_a_run_calls_each_method_once_with_its_own_arguments(
    kind: type[Documented], lines: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = kind()
    group = create_trackers(tracker)
    group.start(RunInfo("one", "digits", tmp_path), {"lr": 0.5})
    group.log({"loss": 1.0}, 2)
    group.finish("success")
    assert tracker.tracker == lines
    assert caplog.messages == []


def test_a_tracker_of_accelerate_goes_on_after_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Lazy()
    group = create_trackers(tracker)
    run = RunInfo("one", "digits", tmp_path)
    group.start(run, {"lr": 0.5})
    group.log({"loss": 1.0}, 2)
    group.flush()
    state = group.state_dict()
    group.finish("failed")
    group.load_state_dict(state)
    group.start(replace(run, resumed_step=2), {"lr": 0.5})
    group.log({"loss": 2.0}, 3)
    group.finish("success")
    leg = ["start", *RECORDS, "finish"]
    assert tracker.tracker == [*leg, "start", ("config", {"lr": 0.5}), (3, {"loss": 2.0}), "finish"]
    assert state == {"run_ids": {}, "last_step": 2, "num_last": 1, "trackers": {}}
    assert caplog.messages == []


def test_methods_of_the_base_do_nothing(tmp_path: Path) -> None:
    class Silent(GeneralTracker):
        name = "silent"

    group = create_trackers(Silent())
    group.start(RunInfo("one", "digits", tmp_path), {})
    group.log({"loss": 1.0}, 2)
    group.finish("failed")
    assert group.trackers[0].name == "silent"


def test_trackers_without_a_place_for_pictures_or_tables_say_who_has_one() -> None:
    class Silent(GeneralTracker):
        name = "silent"

    for tracker in (Silent(), CSVTracker()):
        name = type(tracker).__name__
        with pytest.raises(
            TrackerError, match=rf"{name} has no log_images\. The trackers that have it: mlflow, tensor"
        ):
            tracker.log_images({"a": []}, step=1)
        with pytest.raises(
            TrackerError, match=rf"{name} has no log_table\. The trackers that have it: mlflow, wandb\."
        ):
            tracker.log_table("a", columns=["b"], data=[[1]])


@pytest.mark.parametrize("method", WORDS_WITH)
def test_who_has_a_place_for_these_is_told_truly(method: str) -> None:
    own = getattr(Tracker, method)
    kinds = [TensorBoardTracker, JSONLTracker, CSVTracker, WandbTracker, MLflowTracker]
    having = [kind().name for kind in kinds if getattr(kind, method) is not own]
    assert sorted(having) == list(WORDS_WITH[method])


def test_other_processes_than_the_main_one_skip_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Documented()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tracker.log({"loss": 1.0}, 1)
    tracker.main_process_only = False
    tracker.log({"loss": 2.0}, 2)
    assert tracker.lines == [(2, {"loss": 2.0})]
