from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.api_pb2 import Status as SessionStatus  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.trackers.event_files import EventCount
from loopwright.trackers.tensorboard import TensorBoardTracker
from loopwright.trackers.tracker import RunInfo, Status, Tracker

from .contract import Stored, TrackerContract

STATUS = {"STATUS_SUCCESS": "success", "STATUS_FAILURE": "failed", "STATUS_UNKNOWN": "interrupted"}


def open_events(directory: Path) -> Any:
    # Every event is kept, where the default draws a sample of 10,000.
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return events


def session(events: Any, kind: str) -> Any:
    """The message of the hyperparameter plugin under one of its tags."""
    content = events.SummaryMetadata(f"_hparams_/session_{kind}_info").plugin_data.content
    return getattr(HParamsPluginData.FromString(content), f"session_{kind}_info")


def text(events: Any, tag: str) -> str:
    (event,) = events.Tensors(tag)[-1:]
    return str(event.tensor_proto.string_val[0].decode())


class TestContract(TrackerContract):
    def make(self) -> Tracker:
        return TensorBoardTracker()

    def read(self, run: RunInfo) -> Stored:
        events = open_events(run.directory)
        # Where a run goes on without `resumed_step`, TensorBoard's own view keeps the first leg's outcome.
        newest = max(run.directory.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        return Stored(
            series={tag: [(event.step, event.value) for event in found] for tag, found in scalars.items()},
            config=text(events, "config/text_summary").encode().decode("unicode_escape"),
            status=STATUS[SessionStatus.Name(session(open_events(newest), "end").status)],
        )


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo("one", "digits", tmp_path / "one")


def test_configuration_is_a_text_and_the_hyperparameters_of_a_session(run: RunInfo) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run, {"model": {"width": 64, "fast": True}, "lr": 0.5, "name": "a", "none": None, "list": [1, 2]})
    tracker.finish("success")
    events = open_events(run.directory)
    assert text(events, "config/text_summary").startswith('```json\n{\n  "model": {\n    "width": 64,')
    found = session(events, "start").hparams
    assert {name: value.WhichOneof("kind") for name, value in found.items()} == {
        "model.width": "number_value",
        "model.fast": "bool_value",
        "lr": "number_value",
        "name": "string_value",
        "none": "string_value",
        "list": "string_value",
    }
    assert (found["model.width"].number_value, found["lr"].number_value, found["model.fast"].bool_value) == (
        64,
        0.5,
        True,
    )
    assert (found["name"].string_value, found["none"].string_value, found["list"].string_value) == (
        "a",
        "None",
        "[1, 2]",
    )


def test_scalars_are_32_bit_floats(run: RunInfo) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run, {})
    tracker.log({"count": 2**24 + 1, "third": 1 / 3, "huge": 1e300}, 1)
    tracker.finish("success")
    events = open_events(run.directory)
    found = {tag: events.Scalars(tag)[0].value for tag in ("count", "third", "huge")}
    assert found == {"count": 2.0**24, "third": 0.3333333432674408, "huge": float("inf")}


def test_pictures_and_the_writer_itself(run: RunInfo) -> None:
    tracker = TensorBoardTracker()
    assert tracker.tracker is None
    with pytest.raises(TrackerError, match=r"TensorBoardTracker\.log was called while no run is open"):
        tracker.log_images({"digits": torch.zeros(2, 1, 4, 4)})
    tracker.start(run, {})
    tracker.log_images({"digits": torch.zeros(2, 1, 4, 4)}, step=3)
    assert tracker.tracker is not None and tracker.writer is tracker.tracker
    tracker.tracker.add_scalar("own", 1.0, 3)
    tracker.finish("success")
    events = open_events(run.directory)
    (picture,) = events.Images("digits")
    assert (picture.step, picture.width, picture.height) == (3, 8, 4)
    assert [event.value for event in events.Scalars("own")] == [1.0]


def test_directory_is_where_it_writes(run: RunInfo, tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "events")
    tracker.start(run, {})
    tracker.log({"loss": 1.0}, 1)
    tracker.finish("success")
    assert open_events(tmp_path / "events").Tags()["scalars"] == ["loss"]
    assert not run.directory.exists()


@pytest.mark.parametrize("seconds", [-1, "30", float("inf")])
def test_the_time_between_flushes_is_a_number_of_seconds(seconds: Any) -> None:
    message = rf"TensorBoardTracker\(flush_seconds={seconds!r}\)\. Expected a finite number >= 0\. It is a time in"
    with pytest.raises(ConfigError, match=message):
        TensorBoardTracker(flush_seconds=seconds)


def test_a_start_that_fails_halfway_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    tracker = TensorBoardTracker()
    with pytest.raises(TypeError, match="not JSON serializable"):
        tracker.start(RunInfo("one", "digits", tmp_path / "one"), {"a": object()})
    assert threading.active_count() == before
    tracker.finish("failed")  # nothing is open


def log(run: RunInfo, config: dict[str, Any], *steps: int, status: Status = "success") -> None:
    tracker = TensorBoardTracker()
    tracker.start(run, config)
    for step in steps:
        tracker.log({"loss": float(step)}, step)
    tracker.finish(status)


def set_time(run: RunInfo, seconds: int) -> None:
    """Give the newest event file another time."""
    path = max(run.directory.iterdir())
    path.rename(path.with_name(path.name.replace(path.name.split(".")[3], str(seconds))))


def test_a_resumed_run_shows_its_newest_configuration_and_outcome(run: RunInfo) -> None:
    log(run, {"lr": 0.5}, 1, 2, 3, status="failed")
    log(replace(run, resumed_step=2), {"lr": 0.25}, 3, 4)
    events = open_events(run.directory)
    assert session(events, "start").hparams["lr"].number_value == 0.25
    assert SessionStatus.Name(session(events, "end").status) == "STATUS_SUCCESS"
    texts = [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors("config/text_summary")]
    assert [(step, b"0.5" in content, b"0.25" in content) for step, content in texts] == [
        (0, True, False),
        (2, False, True),
    ]


def test_the_files_themselves_have_no_row_twice(run: RunInfo) -> None:
    """For readers that know nothing of restarts."""
    log(run, {}, 1, 2, 3)
    log(replace(run, resumed_step=2), {}, 3, 4)
    events = [event for path in sorted(run.directory.iterdir()) for event in EventFileLoader(str(path)).Load()]
    rows = [(event.step, value.tag) for event in events for value in event.summary.value]
    assert [step for step, tag in rows if tag == "loss"] == [1, 2, 3, 4]


def test_a_viewer_that_has_read_the_earlier_leg_forgets_its_later_rows(run: RunInfo) -> None:
    log(run, {}, 1, 2, 3)
    set_time(run, 1_000_000_000)
    events = open_events(run.directory)
    log(replace(run, resumed_step=1), {}, 2)
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_a_clock_that_was_set_back_does_not_change_the_order_of_legs(run: RunInfo) -> None:
    for step, future in ((1, 3_000_000_000), (2, 2_000_000_000), (3, None)):
        log(replace(run, resumed_step=step - 1), {}, step)
        if future is not None:
            set_time(run, future)
    assert [event.step for event in open_events(run.directory).Scalars("loss")] == [1, 2, 3]
    times = [int(path.name.split(".")[3]) for path in sorted(run.directory.iterdir())]
    assert times[:2] == [0, 1]
    assert times[2] > 1_000_000_000


def test_what_the_writer_was_given_past_the_tracker_is_known_to_the_checkpoint_too(run: RunInfo) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run, {})
    assert tracker.writer is not None
    for value in (1.0, 2.0):
        tracker.log_images({"digits": torch.full((1, 1, 2, 2), value / 2)}, 5)
        tracker.writer.add_scalar("theirs", value, 5)
        tracker.log({"loss": value}, 5)
        tracker.flush()
        if value == 1.0:
            state = tracker.state_dict()
    tracker.finish("interrupted")
    tracker = TensorBoardTracker()
    tracker.load_state_dict(state)
    tracker.start(replace(run, resumed_step=5), {})
    assert tracker.state_dict()["values"] == state["values"] + 1  # the new leg's text of the configuration
    tracker.finish("success")
    events = open_events(run.directory)
    assert len(events.Images("digits")) == 1
    assert {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in ("theirs", "loss")} == {
        "theirs": [(5, 1.0)],
        "loss": [(5, 1.0)],
    }


def test_events_of_other_writers_are_left_alone(run: RunInfo) -> None:
    with SummaryWriter(str(run.directory)) as writer:
        writer.add_scalar("theirs", 1.0, 1000)
    (theirs,) = run.directory.iterdir()
    content = theirs.read_bytes()
    log(run, {}, 1, 2)
    log(replace(run, resumed_step=1), {}, 2)
    assert theirs.read_bytes() == content


def test_a_damaged_file_is_left_alone(run: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    log(run, {}, 1, 2)
    (path,) = run.directory.iterdir()
    content = bytearray(path.read_bytes())
    content[12] = 0xFF  # the first byte of the first record
    path.write_bytes(content)
    log(replace(run, resumed_step=1), {}, 2)
    assert bytes(content) in [path.read_bytes() for path in run.directory.iterdir()]
    assert f"{path} is damaged and was left as it is: rows behind step 1 may be in it." in caplog.messages


def test_values_up_to_the_damage_of_a_file_are_counted(run: RunInfo) -> None:
    log(run, {}, 1, 2)
    log(replace(run, resumed_step=2), {}, 3)
    first, _ = sorted(run.directory.iterdir())
    count = EventCount(run.directory)
    assert (count.read(), count.read()) == (5, 5)  # three losses, and the text of the configuration for each leg
    content = bytearray(first.read_bytes())
    content[12] = 0xFF  # the first byte of the first record
    first.write_bytes(content)
    assert EventCount(run.directory).read() == 2
