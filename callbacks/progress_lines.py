"""Progress as plain lines, for logs and pipes: one at each point of an interval."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TextIO

from ..distributed.numbers import to_numbers
from .intervals import Interval, Schedule
from .progress_work import Work, format_number, format_seconds, seconds_left

if TYPE_CHECKING:
    from .state import RunState
    from .view import TrainerView


class LineDisplay:
    """Writes a line where the interval is due, and at the end of a run.

    Args:
        every: when; what counts epochs is due after the epoch's validation.
        gap_seconds: an epoch that ends sooner than this after the last line adds none.
        stream: where lines go.
    """

    def __init__(self, *, every: Interval, gap_seconds: float, stream: TextIO) -> None:
        # Times are kept here: those of the run's grid stand still outside of training.
        self._period = min((d.amount for d in every.every if d.unit == "seconds"), default=math.inf)
        self._counted = Interval(tuple(d for d in every.every if d.unit != "seconds"), first=every.first)
        self._gap_seconds = gap_seconds
        self._stream = stream
        self._schedule: Schedule | None = None
        self._last_time = time.monotonic()
        self._is_behind = False  # an epoch ended without its line
        # Whole epochs are over in `finish`; what else counts may come due at any batch.
        self.needs_every_batch = every.first or any(d.unit != "epochs" or not d.is_whole for d in self._counted.every)

    def start(self, state: RunState) -> None:
        """Lay the interval over the run's counters."""
        self._schedule = Schedule(self._counted, state)
        self._last_time = time.monotonic()

    def show(self, work: Work, trainer: TrainerView) -> None:
        """Write a line if one is due. An epoch's last batch waits for `finish`, which knows the validation's values."""
        if not work.is_epoch:
            due = self._is_due_by_time()  # the run's counters stand still
        else:
            due = work.done != work.total and self._is_due(trainer.state)
        if due:
            self._write(work, trainer)

    def finish(self, work: Work, trainer: TrainerView) -> None:
        """An epoch's line, if one is due."""
        if not work.is_epoch:
            return
        far_enough = time.monotonic() - self._last_time >= self._gap_seconds
        if self._is_due(trainer.state) and far_enough:
            self._write(work, trainer)
        else:
            self._is_behind = True

    def end(self, work: Work, trainer: TrainerView) -> None:
        """The last line, unless it was just written."""
        if self._is_behind or work.has_moved:
            self._write(work, trainer)
        self._schedule = None

    def close(self) -> None:
        """Nothing is held."""

    def _is_due(self, state: RunState) -> bool:
        by_count = self._schedule is not None and self._schedule.is_due(state)
        return by_count or self._is_due_by_time()

    def _is_due_by_time(self) -> bool:
        return time.monotonic() - self._last_time >= self._period

    def _write(self, work: Work, trainer: TrainerView) -> None:
        parts = [work.title, f"batch {work.done}" + ("" if work.total is None else f"/{work.total}")]
        if self._schedule is not None:
            parts.append(f"step {trainer.state.step}")
        if (pace := work.lap()) is not None:
            parts.append(f"{format_number(pace)} batches/s")
        if self._schedule is not None and (left := seconds_left(trainer)) is not None:
            parts.append(f"left {format_seconds(left)}")
        parts += [f"{name} {format_number(n)}" for name, n in to_numbers(trainer.progress_metrics).items()]
        print("  ".join(parts), file=self._stream, flush=True)
        self._last_time, self._is_behind = time.monotonic(), False
