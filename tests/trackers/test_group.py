from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.trackers.csv import CSVTracker
from loopwright.trackers.group import TrackerGroup
from loopwright.trackers.jsonl import JSONLTracker
from loopwright.trackers.memory import MemoryTracker
from loopwright.trackers.tracker import RunInfo, Status, Tracker

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

    def flush(self) -> None:
        self.fail("flush")

    def state_dict(self) -> dict[str, Any]:
        self.fail("state_dict")
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fail("load_state_dict")

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


class WithId(MemoryTracker):
    """Knows its runs by ids, as services do, and has a state."""

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        self.position = getattr(self, "loaded", 0)
        run.run_ids.setdefault(self.name, f"id-{len(self.runs)}")
        super().start(run, config)

    def state_dict(self) -> dict[str, Any]:
        return {"position": 7}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["position"]


def test_a_resumed_run_keeps_its_ids_states_and_last_step() -> None:
    first = TrackerGroup([WithId(name="a"), MemoryTracker(name="b")])
    first.start(RunInfo("one", "digits", Path("one")), {})
    first.log({"loss": 1.0}, 5)
    state = first.state_dict()
    assert state == {"run_ids": {"a": "id-0"}, "last_step": 5, "num_last": 1, "trackers": {"a": {"position": 7}}}
    first.log({"loss": 1.0}, 6)
    first.finish("failed")
    assert first.state_dict()["run_ids"] == {"a": "id-0"}

    tracker = WithId(name="a")
    second = TrackerGroup([tracker, MemoryTracker(name="c")])
    second.load_state_dict(state)
    info = RunInfo("one", "digits", Path("one"), resumed_step=4)
    second.start(info, {})
    second.log({"val": 2.0}, 3)  # is held at the last step, and with it what is resumed from
    assert tracker.runs[0].records == [(5, {"val": 2.0})]
    assert (info.run_ids, tracker.runs[0].info.resumed_step, tracker.position) == ({"a": "id-0"}, 5, 7)
    second.finish("success")

    second.start(RunInfo("two", "digits", Path("two")), {})  # another run has nothing of it
    second.log({"val": 2.0}, 3)
    assert tracker.runs[1].records == [(3, {"val": 2.0})]
    second.finish("success")


@pytest.mark.parametrize("kind", ["memory", "jsonl", "csv"])
def test_rows_behind_the_checkpoint_go_also_those_of_its_very_step(kind: str, tmp_path: Path) -> None:
    trackers: dict[str, Tracker] = {"memory": MemoryTracker(), "jsonl": JSONLTracker(), "csv": CSVTracker()}
    group = TrackerGroup([trackers[kind]])
    run = RunInfo("one", "digits", tmp_path)
    group.start(run, {})
    group.log({"loss": 1.0}, 4)
    group.log({"loss": 2.0}, 5)
    group.log({"val": 3.0}, 5)
    state = group.state_dict()
    group.log({"mean": 4.0}, 5)  # as the means of an epoch that a stop cuts short
    group.log({"loss": 5.0}, 7)
    group.finish("interrupted")
    group.load_state_dict(state)
    group.start(replace(run, resumed_step=6), {})
    group.log({"loss": 6.0}, 7)
    group.finish("success")
    kept = [(4, {"loss": 1.0}), (5, {"loss": 2.0}), (5, {"val": 3.0}), (7, {"loss": 6.0})]
    tracker = trackers[kind]
    if isinstance(tracker, MemoryTracker):
        assert tracker.runs[-1].records == kept
    elif kind == "jsonl":
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [(line.pop("step"), line) for line in lines] == kept
    else:
        assert (tmp_path / "metrics.csv").read_text().split() == [
            "step,loss,val",
            "4,1.0,",
            "5,2.0,",
            "5,,3.0",
            "7,6.0,",
        ]


def test_the_step_that_is_resumed_from_is_the_least_of_the_next_leg() -> None:
    tracker = MemoryTracker()
    group = TrackerGroup([tracker])
    group.start(RunInfo("one", "digits", Path("one"), resumed_step=6), {})
    assert group.state_dict()["last_step"] == 6
    group.log({"lr": 1.0}, 2)
    group.finish("success")
    assert tracker.runs[0].records == [(6, {"lr": 1.0})]


def test_one_resume_removes_later_rows_once() -> None:
    group = TrackerGroup([MemoryTracker()])
    info = RunInfo("one", "digits", Path("one"), resumed_step=2)
    group.start(info, {})
    group.finish("success")
    with pytest.raises(TrackerError, match=r"twice with one RunInfo of the run 'one', resumed from step 2.*replace\("):
        group.start(info, {})
    group.start(replace(info, resumed_step=None), {})
    group.finish("success")


def test_a_state_comes_before_the_run() -> None:
    group = TrackerGroup([MemoryTracker()])
    group.start(RUN, {})
    with pytest.raises(TrackerError, match=r"load_state_dict was called while a run is open\. Call it before start"):
        group.load_state_dict(group.state_dict())
    group.finish("success")


def test_processes_that_write_nothing_have_an_empty_state() -> None:
    tracker = Failing("flush", OSError())
    group = TrackerGroup([tracker], enabled=False)
    group.start(RUN, {})
    group.flush()
    group.log({"loss": 1.0}, 3)
    assert group.state_dict()["trackers"] == {}
    assert tracker.calls == []
    group.finish("success")


@pytest.mark.parametrize(
    ("method", "consequence"),
    [
        ("flush", "what was logged last may be missing there if the process is killed"),
        ("state_dict", "a resumed run may have rows twice there"),
        ("load_state_dict", "this run may have rows twice there"),
    ],
)
def test_failures_around_checkpoints_are_reported_once(
    method: str, consequence: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Failing(method, OSError("no route")), MemoryTracker()
    group = TrackerGroup([failing, other])
    group.load_state_dict({"run_ids": {}, "last_step": 0, "num_last": 0, "trackers": {failing.name: {"calls": 1}}})
    group.start(RUN, {})
    for step in range(3):
        group.flush()
        group.log({"loss": 1.0}, step)
        assert group.state_dict()["trackers"].keys() == (set() if method == "state_dict" else {failing.name})
    group.finish("success")
    (message,) = warnings_in(caplog)
    assert f"failed in Failing.{method} (OSError: no route). Training goes on; {consequence}." in message
    assert len(failing.runs[0].records) == len(other.runs[0].records) == 3
