"""`Accelerator.profile` and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.callbacks.profiling import ProfileKwargs
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.accelerator import Accelerator


def test_what_runs_is_recorded_and_written(tmp_path: Path) -> None:
    settings = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=tmp_path / "traces")
    with Accelerator(kwargs_handlers=[settings]).profile() as profiler:
        torch.ones(3, 2).add(1)
    (event,) = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::add"]
    assert (event.count, event.input_shapes[0]) == (1, [3, 2])
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "profile_0.json"
    assert "aten::add" in {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}


def test_a_schedule_records_some_steps(tmp_path: Path) -> None:
    seen = []
    settings = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
    )
    with Accelerator().profile(settings) as profiler:
        for _ in range(6):
            torch.ones(1).add(1)
            profiler.step()
    assert seen == [4]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cpuu"]}, r"ProfileKwargs\.activities holds 'cpuu'\. Did you mean 'cpu'\?"),
        ({"schedule_option": {"waits": 1}}, r"schedule_option has 'waits'\. Did you mean 'wait'\?"),
        ({"schedule_option": "wait"}, r"schedule_option='wait'\. Expected a mapping with wait, warmup, active"),
        ({"on_trace_ready": 3}, r"on_trace_ready=3\. Expected a function of the profiler, or None"),
        ({"schedule_option": {"wait": 1}}, r"has no warmup and no active\. Expected wait, warmup, active"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProfileKwargs(**options)


def test_a_file_in_place_of_the_folder_is_refused_before_the_body(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("")
    profile = Accelerator().profile(ProfileKwargs(output_trace_dir=tmp_path / "traces"))
    with pytest.raises(ConfigError, match=r"output_trace_dir='.*traces' is a file\. Expected a folder"), profile:
        pytest.fail("the body ran")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is recorded here")
def test_what_this_machine_does_not_record_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activities=\['cuda'\]: this machine records none of them\. Give 'cpu'"):
        ProfileKwargs(activities=["cuda"])
    assert ProfileKwargs(activities=["cpu", "cuda"]).activities == ["cpu", "cuda"]
