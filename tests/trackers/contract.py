"""What every tracker must do: one suite, run over each of ours, and over yours.

Subclass it in a test module, say how to make the tracker and how to read back what it wrote:

```python
class TestMyTracker(TrackerContract):
    def make(self) -> Tracker:
        return MyTracker()

    def read(self, run: RunInfo) -> Stored:
        ...
```
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from loopwright.distributed.errors import TrackerError
from loopwright.trackers.group import TrackerGroup
from loopwright.trackers.tracker import RunInfo, Status, Tracker

NAMES = [
    "train/loss",
    "recall@5",
    "recall_5",
    "a@b",
    "a_b",
    "a-x40-b",
    "cpu(%)",
    "acc[top1]",
    "beta=2",
    "val/a b",
    "a//b",
    "/a",
    "a/",
    "../a",
    "./a",
    "a.b",
    "a\\b",
    "*",
    "step",
    "_step",
    "epoch",
    "Loss",
    "loss",
    "genauigkeit/größe",
    "精度",
    "x" * 300,
    "x" * 299 + "y",
]
CONFIG = {"model": {"width": 64, "layers": [1, 2]}, "lr": 0.001, "name": "größe", "resume": None, "fast": True}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a tracker's own reader finds of one run."""

    series: dict[str, list[tuple[int, float]]]
    """Step and value of each metric in the order of the steps, by the name under which it was logged."""
    config: str
    """Some text that holds the configuration."""
    status: str
    """The outcome in the words of `Status`."""


class TrackerContract(ABC):
    """The suite. Every test opens runs of its own in the folder of one project."""

    infinity: ClassVar[float] = math.inf
    """What the backend gives back for an infinity: some databases hold none."""

    @abstractmethod
    def make(self) -> Tracker:
        """A new tracker."""

    @abstractmethod
    def read(self, run: RunInfo) -> Stored:
        """What was stored of a run, by a reader that is not the tracker's own code."""

    @pytest.fixture(scope="class")
    @classmethod
    def project(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("project")

    @pytest.fixture
    def run(self, project: Path, request: pytest.FixtureRequest) -> RunInfo:
        return self.new_run(project, request.node.name.translate(str.maketrans("[]", "--")))

    def new_run(self, project: Path, name: str) -> RunInfo:
        return RunInfo(name, "contract", project / name)

    def record(self, run: RunInfo, *records: tuple[dict[str, float], int], status: Status = "success") -> Stored:
        """Write a whole run, and read it."""
        tracker = self.make()
        tracker.start(run, CONFIG)
        for metrics, step in records:
            tracker.log(metrics, step)
        tracker.finish(status)
        return self.read(run)

    def test_values_are_stored(self, run: RunInfo) -> None:
        stored = self.record(run, ({"loss": 0.25, "count": 7}, 5), ({"loss": -1.5}, 10))
        assert stored.series == {"loss": [(5, 0.25), (10, -1.5)], "count": [(5, 7)]}

    def test_nan_and_infinities_are_stored(self, run: RunInfo) -> None:
        series = self.record(run, ({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, 1)).series
        ((step, value),) = series.pop("a")
        assert (step, math.isnan(value)) == (1, True)
        assert series == {"b": [(1, self.infinity)], "c": [(1, -self.infinity)], "d": [(1, 1.0)]}

    def test_no_two_names_merge(self, run: RunInfo) -> None:
        series = self.record(run, ({name: float(index) for index, name in enumerate(NAMES)}, 3)).series
        assert sorted(series.values()) == [[(3, float(index))] for index in range(len(NAMES))]
        short = {name: [(3, float(index))] for index, name in enumerate(NAMES) if len(name) < 100}
        assert {name: series[name] for name in short} == short

    def test_names_are_the_same_in_every_record(self, run: RunInfo) -> None:
        assert self.record(run, ({"a@b": 1.0}, 1), ({"a_b": 2.0, "a@b": 3.0}, 2)).series == {
            "a@b": [(1, 1.0), (2, 3.0)],
            "a_b": [(2, 2.0)],
        }

    def test_one_step_takes_several_records(self, run: RunInfo) -> None:
        stored = self.record(run, ({"lr": 0.5}, 4), ({"loss": 1.0}, 4), ({"val": 2.0}, 4), ({"lr": 0.25}, 4 + 2**40))
        assert stored.series == {"lr": [(4, 0.5), (4 + 2**40, 0.25)], "loss": [(4, 1.0)], "val": [(4, 2.0)]}

    def test_a_thousand_metrics_in_one_record(self, run: RunInfo) -> None:
        metrics = {f"metric/{index}": float(index) for index in range(1001)}
        assert self.record(run, (metrics, 1)).series == {name: [(1, value)] for name, value in metrics.items()}

    def test_config_is_stored(self, run: RunInfo) -> None:
        text = self.record(run).config
        assert all(part in text for part in ("width", "64", "0.001", "größe"))

    @pytest.mark.parametrize("status", ["success", "failed", "interrupted"])
    def test_status_is_stored(self, run: RunInfo, status: Status) -> None:
        assert self.record(run, ({"loss": 1.0}, 1), status=status).status == status

    def test_one_tracker_records_two_runs(self, project: Path) -> None:
        tracker, runs = self.make(), [self.new_run(project, "first"), self.new_run(project, "second")]
        for step, run in enumerate(runs):
            tracker.start(run, CONFIG)
            tracker.log({"loss": 1.0}, step)
            tracker.finish("success")
        assert [self.read(run).series for run in runs] == [{"loss": [(0, 1.0)]}, {"loss": [(1, 1.0)]}]

    def test_a_resumed_run_goes_on(self, run: RunInfo) -> None:
        self.record(run, ({"loss": 1.0}, 1), status="interrupted")
        stored = self.record(run, ({"loss": 2.0}, 2))
        assert (stored.series, stored.status) == ({"loss": [(1, 1.0), (2, 2.0)]}, "success")

    def resume(self, run: RunInfo, step: int, *records: tuple[dict[str, float], int]) -> Stored:
        """Write a leg that goes on behind a step, with another configuration, and read the whole run."""
        tracker, leg = self.make(), dataclasses.replace(run, resumed_step=step)
        tracker.start(leg, {**CONFIG, "lr": 0.25})
        for metrics, at in records:
            tracker.log(metrics, at)
        tracker.flush()
        tracker.finish("success")
        return self.read(leg)

    def test_a_run_resumed_from_an_earlier_step_has_one_value_for_each(self, run: RunInfo) -> None:
        first = [({"loss": float(step), "a@b": -float(step)}, step) for step in range(1, 11)]
        self.record(run, *first, ({"late": 1.0}, 10), status="failed")
        stored = self.resume(run, 6, *(({"loss": step + 0.5, "a@b": 0.0}, step) for step in range(7, 13)))
        assert stored.series == {
            "loss": [(step, step + 0.5 * (step > 6)) for step in range(1, 13)],
            "a@b": [(step, -step * (step <= 6)) for step in range(1, 13)],
        }
        assert ("0.25" in stored.config, stored.status) == (True, "success")

    def test_a_run_is_resumed_three_times(self, run: RunInfo) -> None:
        self.record(run, *(({"loss": 1.0}, step) for step in (2, 4, 6)), status="interrupted")
        self.resume(run, 6, ({"loss": 2.0}, 8))
        self.resume(run, 3, ({"loss": 3.0}, 4), ({"loss": 3.0}, 8))
        assert self.resume(run, 4, ({"loss": 4.0}, 6)).series == {"loss": [(2, 1.0), (4, 3.0), (6, 4.0)]}

    def test_nothing_is_removed_where_nothing_came_later(self, run: RunInfo) -> None:
        self.record(run, ({"loss": 1.0}, 5), ({"val": 2.0}, 5), status="interrupted")
        assert self.resume(run, 5, ({"loss": 3.0}, 6)).series == {"loss": [(5, 1.0), (6, 3.0)], "val": [(5, 2.0)]}

    def test_what_came_after_the_checkpoint_goes_also_at_its_very_step(self, run: RunInfo) -> None:
        """As the means of an epoch that a stop cut short: the resumed run writes them again."""
        group = TrackerGroup([self.make()])
        group.start(run, CONFIG)
        for metrics, step in (({"loss": 1.0}, 4), ({"loss": 2.0}, 5), ({"val": 3.0}, 5)):
            group.log(metrics, step)
        group.flush()
        state = group.state_dict()
        for metrics, step in (({"mean": 4.0, "loss": 9.0}, 5), ({"loss": 5.0}, 7)):
            group.log(metrics, step)
        group.finish("interrupted")
        for value in (5.5, 6.0):  # the second leg ends before its first checkpoint: the third goes on from the same one
            group, leg = TrackerGroup([self.make()]), dataclasses.replace(run, resumed_step=5)
            group.load_state_dict(copy.deepcopy(state))
            group.start(leg, CONFIG)
            again = group.state_dict()  # of a checkpoint that comes before the first record
            group.log({"mean": value}, 5)
            group.log({"loss": value}, 7)
            group.finish("success")
        group = TrackerGroup([self.make()])
        group.load_state_dict(again | {"run_ids": leg.run_ids})
        group.start(leg, CONFIG)
        group.log({"mean": 4.5}, 5)
        group.finish("success")
        assert self.read(leg).series == {"loss": [(4, 1.0), (5, 2.0)], "val": [(5, 3.0)], "mean": [(5, 4.5)]}

    def test_a_run_begins_again_where_everything_came_later(self, run: RunInfo) -> None:
        self.record(run, ({"loss": 1.0}, 0), ({"loss": 1.0}, 1), status="interrupted")
        assert self.resume(run, -1, ({"val": 2.0}, 1)).series == {"val": [(1, 2.0)]}

    def test_a_run_of_which_nothing_is_left_is_resumed(self, run: RunInfo) -> None:
        assert self.resume(run, 6, ({"loss": 1.0}, 7)).series == {"loss": [(7, 1.0)]}

    def test_flush_without_a_run_does_nothing(self, run: RunInfo) -> None:
        tracker = self.make()
        tracker.flush()
        assert self.record(run, ({"loss": 1.0}, 1)).series == {"loss": [(1, 1.0)]}

    def test_arguments_are_left_alone(self, run: RunInfo) -> None:
        tracker, config, metrics = self.make(), copy.deepcopy(CONFIG), {"a@b": 1.0}
        tracker.start(run, config)
        tracker.log(metrics, 1)
        tracker.finish("success")
        assert (config, metrics) == (CONFIG, {"a@b": 1.0})

    def test_log_without_a_run_is_an_error(self) -> None:
        with pytest.raises(
            TrackerError, match=r"log was called while no run is open\. Call start\(run, config\) first"
        ):
            self.make().log({"loss": 1.0}, 1)

    def test_log_after_finish_is_an_error(self, run: RunInfo) -> None:
        tracker = self.make()
        tracker.start(run, CONFIG)
        tracker.finish("success")
        with pytest.raises(TrackerError, match="log was called while no run is open"):
            tracker.log({"loss": 1.0}, 1)

    def test_finish_without_a_run_does_nothing(self, run: RunInfo) -> None:
        tracker = self.make()
        tracker.finish("failed")
        tracker.start(run, CONFIG)
        tracker.finish("success")
        tracker.finish("failed")
        assert self.read(run).status == "success"
