"""`TrackerGroup`: several trackers as one, none of which can end the run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from ..distributed.errors import ConfigError, TrackerError
from .config import plain_config
from .tracker import RunInfo, Status, Tracker
from .values import MetricCleaner

logger = logging.getLogger(__name__)


class TrackerGroup:
    """Starts, feeds and finishes trackers together.

    What is logged is turned into plain numbers once for all of them. Records are held non-decreasing in step: one that
    comes with a smaller step than the last is written at the last one's, so that no backend drops it.

    A tracker that raises is reported once per run by a warning of the logger `loopwright.trackers.group`; each further
    failure is a debug message with its traceback. One whose `start` failed gets nothing more in this run; one whose
    `log` failed is tried again with the next record. `KeyboardInterrupt` and `SystemExit` pass through.

    Args:
        trackers: in the order in which they are called.
        enabled: whether this process writes. False on all but the main process: then every call does nothing.
    Raises:
        ConfigError: a tracker has no name, or two have the same.
    """

    def __init__(self, trackers: Iterable[Tracker] = (), *, enabled: bool = True) -> None:
        self.trackers: tuple[Tracker, ...] = tuple(trackers)
        """All trackers of the group, also those that failed to start."""
        self.enabled = enabled
        self.is_open = False
        """Whether a run was started and not finished."""
        self._live: list[Tracker] = []
        self._reported: set[str] = set()
        self._last_step = 0
        self._cleaner = MetricCleaner()
        _check_names(self.trackers)

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the run in every tracker; its configuration is made plain and freed of secrets first.

        After `finish` it may be called again, for the next run.

        Raises:
            TrackerError: a run is open.
        """
        if self.is_open:
            raise TrackerError(
                f"start was called for the run {run.name!r} while one is open. Call finish(status) first."
            )
        self.is_open = True
        self._last_step = 0
        self._reported.clear()
        self._cleaner = MetricCleaner()
        if not self.enabled or not self.trackers:
            return
        plain = plain_config(config)
        for tracker in self.trackers:
            if self._call(tracker, "start", run, copy.deepcopy(plain)):
                self._live.append(tracker)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write one record to every tracker; values may be tensors, NumPy scalars, None and whatever else was logged.

        Raises:
            TrackerError: no run is open.
        """
        if not self.is_open:
            raise TrackerError("log was called while no run is open. Call start(run, config) first.")
        if not self._live:
            return
        record = self._cleaner.clean(metrics)
        self._last_step = max(self._last_step, int(step))
        if not record:
            return
        for tracker in self._live:
            self._call(tracker, "log", dict(record), self._last_step)

    def finish(self, status: Status) -> None:
        """Close the run in every tracker that opened it. Where no run is open it does nothing."""
        self.is_open = False
        live, self._live = self._live, []
        with ExitStack() as stack:
            # The stack closes all of them, also when an interrupt comes while one is closing.
            for tracker in reversed(live):
                stack.callback(self._call, tracker, "finish", status)

    def _call(self, tracker: Tracker, method: str, *arguments: Any) -> bool:
        """Call one method of one tracker. Returns whether it succeeded."""
        try:
            getattr(tracker, method)(*arguments)
        except Exception as error:  # noqa: BLE001
            # Bookkeeping must not cost anybody a training run: it is said, and training goes on.
            self._report(tracker, method, error)
            return False
        return True

    def _report(self, tracker: Tracker, method: str, error: Exception) -> None:
        logger.debug("%s.%s failed", type(tracker).__name__, method, exc_info=error)
        if tracker.name in self._reported:
            return
        self._reported.add(tracker.name)
        logger.warning(
            "tracker %r failed in %s.%s (%s: %s). Training goes on; %s. Further failures of this tracker are not "
            "reported; set the logger 'loopwright.trackers' to DEBUG to see each with its traceback.",
            tracker.name,
            type(tracker).__name__,
            method,
            type(error).__name__,
            error,
            _CONSEQUENCES[method],
        )


_CONSEQUENCES = {
    "start": "nothing of this run is written there",
    "log": "this record may be missing there, the next is tried again",
    "finish": "what was not written yet may be missing there",
}


def _check_names(trackers: Iterable[Tracker]) -> None:
    seen: set[str] = set()
    for tracker in trackers:
        if not hasattr(tracker, "name"):
            kind = type(tracker).__name__
            raise ConfigError(f"{kind} has no name. Give the class one word for messages: name = {kind.lower()!r}.")
        if tracker.name in seen:
            raise ConfigError(
                f"trackers: two of them are named {tracker.name!r}. Leave one out, or give it a name of its own: "
                f"{type(tracker).__name__}(..., name={tracker.name + '-2'!r})."
            )
        seen.add(tracker.name)
