"""Trackers that were written for Accelerate, as its documentation shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loopwright.trackers.general import GeneralTracker, on_main_process
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo


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


def test_methods_of_the_base_do_nothing(tmp_path: Path) -> None:
    class Silent(GeneralTracker):
        name = "silent"

    group = create_trackers(Silent())
    group.start(RunInfo("one", "digits", tmp_path), {})
    group.log({"loss": 1.0}, 2)
    group.finish("failed")
    assert group.trackers[0].name == "silent"


def test_other_processes_than_the_main_one_skip_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Documented()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tracker.log({"loss": 1.0}, 1)
    tracker.main_process_only = False
    tracker.log({"loss": 2.0}, 2)
    assert tracker.lines == [(2, {"loss": 2.0})]
