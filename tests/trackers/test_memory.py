from __future__ import annotations

import json
from pathlib import Path

from loopwright.trackers.memory import MemoryRun, MemoryTracker
from loopwright.trackers.tracker import RunInfo, Tracker

from .contract import Stored, TrackerContract


class TestContract(TrackerContract):
    tracker: MemoryTracker | None = None

    def make(self) -> Tracker:
        # One for all legs of a test: what it holds ends with it.
        self.tracker = self.tracker or MemoryTracker()
        return self.tracker

    def read(self, run: RunInfo) -> Stored:
        assert self.tracker is not None
        legs = [leg for leg in self.tracker.runs if leg.info.directory == run.directory]
        names = {name for leg in legs for _, metrics in leg.records for name in metrics}
        return Stored(
            series={name: [point for leg in legs for point in leg.series(name)] for name in names},
            config=json.dumps(legs[-1].config, ensure_ascii=False),
            status=str(legs[-1].status),
        )


def test_series_and_status_of_an_open_run() -> None:
    leg = MemoryRun(RunInfo("one", "digits", Path("one")), {}, [(1, {"a": 1.0, "b": 2.0}), (2, {"a": 3.0})])
    assert (leg.series("a"), leg.series("b"), leg.series("c"), leg.status) == (
        [(1, 1.0), (2, 3.0)],
        [(1, 2.0)],
        [],
        None,
    )
