from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.api_pb2 import Status as SessionStatus  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.trackers.tensorboard import TensorBoardTracker
from loopwright.trackers.tracker import RunInfo, Tracker

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
        # Of a resumed run TensorBoard's own view keeps the first leg's outcome; each leg has a file of its own.
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
    assert tracker.tracker is not None
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
