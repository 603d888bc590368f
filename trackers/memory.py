"""`MemoryTracker`: keeps everything in lists, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .files import Behind, say_removed
from .tracker import RunInfo, Status, Tracker, opened


@dataclass(slots=True)
class MemoryRun:
    """What was written of one run, between `start` and `finish`."""

    info: RunInfo
    """The run as the tracker was told of it."""
    config: dict[str, Any]
    """Its configuration, nested and plain."""
    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and metrics of each record, in the order of arrival."""
    status: Status | None = None
    """Its outcome, None while it is open."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """Step and value of each record that has this metric."""
        return [(step, metrics[name]) for step, metrics in self.records if name in metrics]


class MemoryTracker(Tracker):
    """Keeps every run in memory. One that is resumed in the same process goes on with its records up to that step.

    Args:
        name: the tracker's name, where a run has two of them.
    """

    def __init__(self, *, name: str = "memory") -> None:
        self.name = name
        self.runs: list[MemoryRun] = []
        """Every run that was started, the newest last."""
        self._open: MemoryRun | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Add a run to `runs`; a resumed one takes the place of what there is of its folder."""
        self._open = MemoryRun(run, dict(config))
        if run.resumed_step is not None:
            earlier = [each for each in self.runs if each.info.directory == run.directory]
            is_behind = Behind(run)
            records = [record for each in earlier for record in each.records]
            self._open.records = [record for record in records if not is_behind(record[0])]
            say_removed(self.name, len(records) - len(self._open.records), run.resumed_step, "memory")
            self.runs = [each for each in self.runs if each.info.directory != run.directory]
        self.runs.append(self._open)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep one record.

        Raises:
            TrackerError: no run is open.
        """
        opened(self._open, self).records.append((step, dict(metrics)))

    def finish(self, status: Status) -> None:
        """Keep the outcome."""
        run, self._open = self._open, None
        if run is not None:
            run.status = status
