"""Experiment trackers of an `Accelerator`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from loopwright.distributed.errors import ConfigError, TrackerError
from loopwright.distributed.process import ProcessState
from loopwright.trackers.csv import CSVTracker
from loopwright.trackers.general import GeneralTracker
from loopwright.trackers.kinds import LoggerType
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.accelerator import Accelerator


def test_records_reach_every_tracker(tmp_path: Path) -> None:
    memory = MemoryTracker()
    accelerator = Accelerator(log_with=["jsonl", memory], project_dir=tmp_path)
    assert accelerator.trackers == []
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5), "count": 3})
    accelerator.log({"loss": 0.25}, step=4)
    accelerator.log({"loss": 0.125})
    accelerator.end_training()
    (run,) = memory.runs
    assert (run.info.name, run.info.project, run.config, run.status) == ("digits", "digits", {"lr": 0.1}, "success")
    assert run.records == [(0, {"loss": 0.5, "count": 3}), (4, {"loss": 0.25}), (5, {"loss": 0.125})]
    lines = (tmp_path / "digits" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines if "loss" in line] == [0.5, 0.25, 0.125]


def test_without_trackers_logging_does_nothing() -> None:
    accelerator = Accelerator()
    accelerator.log({"loss": 1.0})
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert accelerator.trackers == []
    accelerator.get_tracker("wandb").log({"loss": 1.0}, step=3)
    assert list(Path().iterdir()) == []


def test_options_reach_the_tracker_that_they_are_for(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="csv")
    other = {"wandb": {"entity": "nobody"}}
    accelerator.init_trackers("digits", init_kwargs={"csv": {"path": tmp_path / "own.csv", "name": "first"}, **other})
    tracker = accelerator.get_tracker("csv")
    assert isinstance(tracker, CSVTracker)
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert (tmp_path / "own.csv").exists()


class Noted(GeneralTracker):
    """Written for Accelerate; keeps the options of each record."""

    name = "noted"

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((values, step, kwargs))


def test_options_of_a_record_reach_the_tracker_that_they_are_for(tmp_path: Path) -> None:
    noted = Noted()
    accelerator = Accelerator(log_with=[noted, "tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("digits")
    options = {"noted": {"commit": False}, "tensorboard": {"walltime": 77.0}, "wandb": {"commit": True}, "aim": {}}
    accelerator.log({"loss": 1.0}, step=3, log_kwargs=options)
    accelerator.log({"loss": 2.0})
    with pytest.raises(ConfigError, match=r"TensorBoardTracker\.log has no such option\. Did you mean 'walltime'\?"):
        accelerator.log({"loss": 3.0}, log_kwargs={"tensorboard": {"waltime": 1.0}})
    with pytest.raises(ConfigError, match=r"Noted\.log has no such option\. It takes all others"):
        accelerator.log({"loss": 3.0}, log_kwargs={"noted": {"step": 1}})
    for wrong in ({"noted": None}, ["noted"]):
        with pytest.raises(ConfigError, match=r"log\(log_kwargs=.*\)\. Expected options by the tracker's word"):
            accelerator.log({"loss": 3.0}, log_kwargs=wrong)  # type: ignore[arg-type]
    accelerator.end_training()
    assert noted.lines == [({"loss": 1.0}, 3, {"commit": False}), ({"loss": 2.0}, 4, {})]
    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    first, second = events.Scalars("loss")
    assert (first.wall_time, first.step, first.value, second.step) == (77.0, 3, 1.0, 4)
    assert second.wall_time > 1e9


def test_other_processes_have_a_tracker_that_takes_everything() -> None:
    process = ProcessState(cpu=True)
    process.process_index = 1
    accelerator = Accelerator(log_with=Noted(), process=process)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 1.0}, log_kwargs={"noted": {"any": 1}})
    assert accelerator.trackers == []
    tracker = accelerator.get_tracker("noted", unwrap=True)
    tracker.log({"loss": 1.0}, step=3)
    tracker.log_images({"digits": []}, step=3)
    tracker.log_table("guesses", columns=["a"], data=[[1]])
    tracker.log_figure(None, "a.png")
    tracker.log_artifact("a")
    tracker.log_artifacts("a")
    with pytest.raises(ConfigError, match="names no tracker"):  # where the main process gets it as well
        accelerator.log({"loss": 1.0}, log_kwargs={"notd": {}})
    accelerator.end_training()


def test_the_run_may_have_a_name_of_its_own() -> None:
    memory = MemoryTracker()
    accelerator = Accelerator(log_with=memory, project_dir="work")
    accelerator.init_trackers("digits", init_kwargs={"memory": {"name": "first"}})
    assert (memory.runs[0].info.name, memory.runs[0].info.project) == ("first", "digits")
    assert memory.runs[0].info.directory == Path("work/digits")
    accelerator.end_training()


@pytest.mark.parametrize("word", [LoggerType.TENSORBOARD, "tensorboard"])
def test_trackers_are_named_by_accelerates_words(word: str, tmp_path: Path) -> None:
    accelerator = Accelerator(log_with=[word], project_dir=tmp_path)
    accelerator.init_trackers("digits")
    assert accelerator.get_tracker("tensorboard", unwrap=True).log_dir == str(tmp_path / "digits")
    accelerator.end_training()
    with pytest.raises(ConfigError, match=r"trackers='aim' is unknown"):
        Accelerator(log_with=LoggerType.AIM)


def test_a_second_run_may_follow_the_first() -> None:
    memory = MemoryTracker()
    accelerator = Accelerator(log_with=memory)
    for project in ("one", "two"):
        accelerator.init_trackers(project)
        accelerator.log({"loss": 1.0})
        accelerator.end_training()
    assert [(run.info.project, run.records) for run in memory.runs] == [
        ("one", [(0, {"loss": 1.0})]),
        ("two", [(0, {"loss": 1.0})]),
    ]


def test_what_is_asked_of_trackers_has_to_be_there() -> None:
    accelerator = Accelerator(log_with=MemoryTracker())
    with pytest.raises(TrackerError, match=r"accelerator\.log was called while no run is open\. Call init_trackers"):
        accelerator.log({"loss": 1.0})
    with pytest.raises(ConfigError, match=r"names no tracker\. Did you mean 'wandb'\?"):
        accelerator.init_trackers("digits", init_kwargs={"wandbb": {}})
    with pytest.raises(ConfigError, match=r"was given as an object, which has its options already"):
        accelerator.init_trackers("digits", init_kwargs={"memory": {"size": 3}})
    accelerator.init_trackers("digits")
    with pytest.raises(TrackerError, match=r"get_tracker\('wandb'\): no such tracker is open\. Accepted: memory\."):
        accelerator.get_tracker("wandb")
    with pytest.raises(TrackerError, match=r"MemoryTracker has nothing to unwrap"):
        accelerator.get_tracker("memory", unwrap=True)
    with pytest.raises(
        ConfigError, match=r"'memory': \{'commit': \.\.\.\}\}\): MemoryTracker\.log has no such option\. It"
    ):
        accelerator.log({"loss": 1.0}, log_kwargs={"memory": {"commit": True}})
    with pytest.raises(
        ConfigError, match=r"log\(log_kwargs=\{'memry': \.\.\.\}\) names no tracker\. Did you mean 'memory'\?"
    ):
        accelerator.log({"loss": 1.0}, log_kwargs={"memry": {}})
    accelerator.end_training()
