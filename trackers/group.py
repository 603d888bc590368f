"""`TrackerGroup`: several trackers as one, none of which can end the run."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypedDict

from ..distributed.errors import ConfigError, TrackerError, suggest
from .config import plain_config
from .tracker import RunInfo, Status, Tracker
from .values import MetricCleaner

logger = logging.getLogger(__name__)


class GroupState(TypedDict):
    """What a checkpoint keeps of the trackers."""

    run_ids: dict[str, str]
    """The ids under which trackers know the run."""
    last_step: int
    """The step of the last record."""
    num_last: int
    """How many records that step has."""
    trackers: dict[str, dict[str, Any]]
    """`state_dict` of each tracker that has one, by name."""


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
        self.seconds: dict[str, float] = {}
        """What each tracker has taken since the run was started, by its name."""
        self._live: list[Tracker] = []
        self._reported: set[str] = set()
        self._last_step = 0
        self._num_last = 0
        self._run: RunInfo | None = None
        self._resumed: GroupState | None = None
        self._cleaner = MetricCleaner()
        _check_names(self.trackers)

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the run in every tracker; its configuration is made plain and freed of secrets first.

        After `finish` it may be called again, for the next run, or with another `RunInfo` for the same one. A run that
        goes on by `run.resumed_step`, or by what `load_state_dict` was given, keeps its ids and never falls behind its
        last step.

        Raises:
            TrackerError: a run is open, or this one was resumed by the same `RunInfo` before.
        """
        if self.is_open:
            raise TrackerError(
                f"start was called for the run {run.name!r} while one is open. Call finish(status) first."
            )
        if run is self._run and run.resumed_step is not None:
            raise TrackerError(
                f"start was called twice with one RunInfo of the run {run.name!r}, resumed from step "
                f"{run.resumed_step}: that would remove what was logged since. Give it a "
                "dataclasses.replace(run, resumed_step=None)."
            )
        self.is_open = True
        self._run = run
        resumed, self._resumed = self._resumed, None
        leg = run if resumed is None else _continued(run, resumed)
        self._last_step = max(0, leg.resumed_step or 0, 0 if resumed is None else resumed["last_step"])
        self._num_last = resumed["num_last"] if resumed and resumed["last_step"] == self._last_step else 0
        self._reported.clear()
        self.seconds = {tracker.name: 0.0 for tracker in self.trackers}
        self._cleaner = MetricCleaner()
        if not self.enabled or not self.trackers:
            return
        plain = plain_config(config)
        states = {} if resumed is None else resumed["trackers"]
        for tracker in self.trackers:
            if tracker.name in states:
                self._call(tracker, "load_state_dict", states[tracker.name])
            if self._call(tracker, "start", leg, copy.deepcopy(plain)):
                self._live.append(tracker)

    def log(
        self, metrics: Mapping[str, Any], step: int, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Write one record to every tracker; values may be tensors, NumPy scalars, None and whatever else was logged.

        Args:
            metrics: by name.
            step: the optimizer step that they belong to.
            options: further arguments of single trackers' `log`, by the tracker's name.
        Raises:
            TrackerError: no run is open.
            ConfigError: on every process: a tracker's `log` does not take an option.
        """
        options = options or {}
        for tracker in self.trackers:
            _check_options(tracker, options.get(tracker.name, {}))
        if not self.is_open:
            raise TrackerError("log was called while no run is open. Call start(run, config) first.")
        if not self._live:
            return
        record = self._cleaner.clean(metrics)
        if step > self._last_step:
            self._last_step, self._num_last = int(step), 0
        if not record:
            return
        self._num_last += 1
        for tracker in self._live:
            self._call(tracker, "log", dict(record), self._last_step, **options.get(tracker.name, {}))

    def flush(self) -> None:
        """Put all that was logged on the disk, or send it. Where no run is open it does nothing."""
        for tracker in self._live:
            self._call(tracker, "flush")

    def state_dict(self) -> GroupState:
        """What a later leg of this run needs, as plain values."""
        states = {tracker.name: state for tracker in self._live if (state := self._state_of(tracker))}
        return {
            "run_ids": {} if self._run is None else dict(self._run.run_ids),
            "last_step": self._last_step,
            "num_last": self._num_last,
            "trackers": states,
        }

    def load_state_dict(self, state: GroupState) -> None:
        """Let the next `start` continue the run that `state_dict` was called in.

        Raises:
            TrackerError: a run is open.
        """
        if self.is_open:
            raise TrackerError("load_state_dict was called while a run is open. Call it before start(run, config).")
        self._resumed = state

    def finish(self, status: Status) -> None:
        """Close the run in every tracker that opened it. Where no run is open it does nothing."""
        self.is_open = False
        live, self._live = self._live, []
        with ExitStack() as stack:
            # The stack closes all of them, also when an interrupt comes while one is closing.
            for tracker in reversed(live):
                stack.callback(self._call, tracker, "finish", status)

    def _call(self, tracker: Tracker, method: str, *arguments: Any, **options: Any) -> bool:
        """Call one method of one tracker. Returns whether it succeeded."""
        began = time.perf_counter()
        try:
            getattr(tracker, method)(*arguments, **options)
        except Exception as error:  # noqa: BLE001
            # Bookkeeping must not cost anybody a training run: it is said, and training goes on.
            self._report(tracker, method, error)
            return False
        finally:
            self.seconds[tracker.name] += time.perf_counter() - began
        return True

    def _state_of(self, tracker: Tracker) -> dict[str, Any]:
        try:
            return tracker.state_dict()
        except Exception as error:  # noqa: BLE001
            self._report(tracker, "state_dict", error)  # as in `_call`: the checkpoint is worth more
            return {}

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
    "flush": "what was logged last may be missing there if the process is killed",
    "state_dict": "a resumed run may have rows twice there",
    "load_state_dict": "this run may have rows twice there",
    "finish": "what was not written yet may be missing there",
}


def _continued(run: RunInfo, resumed: GroupState) -> RunInfo:
    """The run with the ids of its earlier leg, behind the last step that was written before the checkpoint."""
    for name, run_id in resumed["run_ids"].items():
        run.run_ids.setdefault(name, run_id)
    if run.resumed_step is None:
        return run
    step, last_record = max(run.resumed_step, resumed["last_step"]), (resumed["last_step"], resumed["num_last"])
    return dataclasses.replace(run, resumed_step=step, last_record=last_record)


def _check_options(tracker: Tracker, options: Mapping[str, Any]) -> None:
    if not options:
        return
    parameters = list(inspect.signature(tracker.log).parameters.values())
    record = [parameter.name for parameter in parameters[:2]]  # the metrics and the step
    known = [parameter.name for parameter in parameters[2:] if parameter.kind is not parameter.VAR_KEYWORD]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in options:
        if name not in known and (name in record or not takes_any):
            accepted = suggest(name, known) if known else f"It takes {'all others' if takes_any else 'none'}."
            raise ConfigError(
                f"log(log_kwargs={{{tracker.name!r}: {{{name!r}: ...}}}}): {type(tracker).__name__}.log has no such "
                f"option. {accepted}"
            )


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
