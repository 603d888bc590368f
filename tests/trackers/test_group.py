from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.trackers.group import TrackerGroup
from loopwright.trackers.memory import MemoryTracker
from loopwright.trackers.tracker import RunInfo, Status

RUN = RunInfo("one", "digits", Path("runs/one"))


class Failing(MemoryTracker):
    """Raises in one method, for as many calls as it is told."""

    def __init__(self, method: str, error: BaseException, times: int = 10**9) -> None:
        super().__init__(name=f"failing-{method}")
        self.method, self.error, self.times = method, error, times
        self.calls: list[str] = []

    def fail(self, method: str) -> None:
        self.calls.append(method)
        if method == self.method and self.times > 0:
            self.times -= 1
            raise self.error

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        self.fail("start")
        super().start(run, config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.fail("log")
        super().log(metrics, step)

    def finish(self, status: Status) -> None:
        self.fail("finish")
        super().finish(status)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_every_tracker_gets_plain_values_and_config_of_its_own() -> None:
    first, second = MemoryTracker(name="first"), MemoryTracker(name="second")
    group = TrackerGroup([first, second])
    group.start(RUN, {"lr": torch.tensor(0.5), "api_key": "k", "nested": {"a": [1]}})
    group.log({"loss": torch.tensor(2.0), "none": None}, 3)
    group.finish("success")
    for tracker in (first, second):
        (run,) = tracker.runs
        assert (run.info, run.config) == (RUN, {"lr": 0.5, "api_key": "***", "nested": {"a": [1]}})
        assert (run.records, run.status) == ([(3, {"loss": 2.0})], "success")
    assert first.runs[0].config["nested"] is not second.runs[0].config["nested"]
    assert first.runs[0].records[0][1] is not second.runs[0].records[0][1]


def test_a_record_without_a_number_is_not_written() -> None:
    tracker = MemoryTracker()
    group = TrackerGroup([tracker])
    group.start(RUN, {})
    group.log({}, 1)
    group.log({"none": None}, 2)
    group.finish("success")
    assert tracker.runs[0].records == []


def test_a_failing_log_is_reported_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Failing("log", OSError("disk full"), times=2), MemoryTracker()
    group = TrackerGroup([failing, other])
    group.start(RUN, {})
    for step in range(4):
        group.log({"loss": float(step)}, step)
    group.finish("success")
    assert warnings_in(caplog) == [
        "tracker 'failing-log' failed in Failing.log (OSError: disk full). Training goes on; this record may be "
        "missing there, the next is tried again. Further failures of this tracker are not reported; set the logger "
        "'loopwright.trackers' to DEBUG to see each with its traceback."
    ]
    assert failing.runs[0].series("loss") == [(2, 2.0), (3, 3.0)]
    assert failing.runs[0].status == "success"
    assert other.runs[0].series("loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_each_failure_is_a_debug_message_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "loopwright.trackers")
    group = TrackerGroup([Failing("log", OSError("disk full"))])
    group.start(RUN, {})
    for step in range(3):
        group.log({"loss": 1.0}, step)
    group.finish("success")
    assert len([record for record in caplog.records if record.levelno == logging.DEBUG and record.exc_info]) == 3
    assert len(warnings_in(caplog)) == 1


def test_a_tracker_that_can_not_start_is_left_alone_until_the_next_run(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Failing("start", ConnectionError("no route"), times=1), MemoryTracker()
    group = TrackerGroup([failing, other])
    for _ in range(2):
        group.start(RUN, {})
        group.log({"loss": 1.0}, 1)
        group.finish("failed")
    (message,) = warnings_in(caplog)
    assert "failed in Failing.start (ConnectionError: no route). Training goes on; nothing of this run is" in message
    assert failing.calls == ["start", "start", "log", "finish"]
    assert [run.status for run in other.runs] == ["failed", "failed"]


def test_a_failing_finish_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    other = MemoryTracker()
    group = TrackerGroup([Failing("finish", ValueError("x")), other])
    group.start(RUN, {})
    group.finish("interrupted")
    (message,) = warnings_in(caplog)
    assert "failed in Failing.finish (ValueError: x). Training goes on; what was not written yet may be" in message
    assert other.runs[0].status == "interrupted"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_interrupts_pass_through_and_every_started_tracker_is_closed(method: str, error: BaseException) -> None:
    first, last = MemoryTracker(name="first"), MemoryTracker(name="last")
    group = TrackerGroup([first, Failing(method, error, times=1), last])
    with pytest.raises(type(error), match=str(error) or None):
        group.start(RUN, {})
        group.log({"loss": 1.0}, 1)
        group.finish("success")
    group.finish("interrupted")
    expected = "success" if method == "finish" else "interrupted"
    assert [run.status for run in first.runs] == [expected]
    assert [run.status for run in last.runs] == ([] if method == "start" else [expected])


def test_finish_happens_once() -> None:
    tracker = Failing("none", ValueError())
    group = TrackerGroup([tracker])
    group.finish("failed")
    group.start(RUN, {})
    group.finish("success")
    group.finish("failed")
    assert tracker.calls == ["start", "finish"]
    assert tracker.runs[0].status == "success"


@pytest.mark.parametrize("enabled", [True, False])
def test_wrong_order_is_an_error_on_every_process(enabled: bool) -> None:
    group = TrackerGroup([MemoryTracker()], enabled=enabled)
    with pytest.raises(TrackerError, match=r"log was called while no run is open\. Call start\(run, config\) first"):
        group.log({"loss": 1.0}, 1)
    group.start(RUN, {})
    with pytest.raises(TrackerError, match=r"start was called for the run 'one' while one is open\. Call finish"):
        group.start(RUN, {})
    group.finish("success")


def test_other_processes_write_nothing() -> None:
    tracker = MemoryTracker()
    group = TrackerGroup([tracker], enabled=False)
    group.start(RUN, {})
    group.log({"loss": 1.0}, 1)
    group.finish("success")
    assert tracker.runs == []


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two of them are named 'memory'.*MemoryTracker\(\.\.\., name='memory-2'\)"):
        TrackerGroup([MemoryTracker(), MemoryTracker()])
    assert len(TrackerGroup([MemoryTracker(), MemoryTracker(name="memory-2")]).trackers) == 2


def test_a_tracker_without_a_name_is_refused() -> None:
    class Nameless(MemoryTracker):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Nameless has no name\. .*: name = 'nameless'"):
        TrackerGroup([Nameless()])
