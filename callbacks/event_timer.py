"""`EventTimer`: what each callback takes at each event, and which calls were slow."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, TextIO

from ..distributed.errors import check_boolean, check_number
from .callback import Callback

if TYPE_CHECKING:
    from .ledger import Cost
    from .view import TaskView, TrainerView

_COLUMNS = ("callback", "event", "calls", "total s", "mean ms", "longest ms", "share", "waits")


class EventTimer(Callback):
    """Names slow callbacks: a warning at the next record, and a table on stderr when the training ends.

    The times are those that a Trainer takes always, on the host: nothing runs per step for this. A call's time leaves
    out what other callbacks took inside it. What a callback causes elsewhere, such as a device that has to be waited
    for later, is not seen.

    Args:
        slow_seconds: one call that takes longer is warned of, once for each callback and event. None: no warning.
        least_share: callbacks and trackers below this share of the training's time are left out of the table, 0 to 1.
        stream: where the table is written in place of stderr, by the main process.
        synchronizations: also count how often each callback waits for a device to read values from it, or would wait
            if it were on one: `item`, `bool`, `nonzero`, masks, copies to the host. Handlers take longer for it.
    Raises:
        ConfigError: an argument is no number of its range.
    """

    steers = False

    def __init__(
        self,
        *,
        slow_seconds: float | None = 1.0,
        least_share: float = 0.0,
        stream: TextIO | None = None,
        synchronizations: bool = False,
    ) -> None:
        if slow_seconds is not None:
            hint = "None: no warning."
            check_number("EventTimer(slow_seconds)", slow_seconds, above=0, allows_infinity=False, hint=hint)
        check_number("EventTimer(least_share)", least_share, least=0, hint="0 shows all.")
        check_boolean("EventTimer(synchronizations)", synchronizations)
        self.counts_synchronizations = synchronizations
        self._slow_seconds = slow_seconds
        self._least_share = least_share
        self._stream = stream
        self._named: set[tuple[str, str]] = set()

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """A new run: what is slow in it is named anew."""
        self._named.clear()

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        """Name what was slow since the last record."""
        self._name_slow(trainer)

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Show the table."""
        self._name_slow(trainer)
        if trainer.process.is_main_process:
            table = cost_table(trainer, self._least_share, synchronizations=self.counts_synchronizations)
            print(table, file=self._stream or sys.stderr, flush=True)

    def _name_slow(self, trainer: TrainerView) -> None:
        for cost in trainer.callback_costs if self._slow_seconds is not None else ():
            place = (cost.owner, cost.event)
            if cost.longest > (self._slow_seconds or 0.0) and place not in self._named:
                self._named.add(place)
                warnings.warn(
                    f"{cost.owner}.{cost.event} took {cost.longest:.2f} s in one call, and {cost.seconds:.2f} s in all "
                    f"{cost.calls} until step {trainer.state.step}; training waits for it.",
                    stacklevel=2,
                )


def cost_table(trainer: TrainerView, least_share: float = 0.0, *, synchronizations: bool = False) -> str:
    """The costs of a training as a table: each callback at each event, and each tracker, the most expensive first.

    Args:
        trainer: of the training.
        least_share: of its time; what took less is left out.
        synchronizations: whether they were counted, and have a column.
    """
    total = sum(trainer.training_seconds.values())
    rows = [_row(cost, total) for cost in trainer.callback_costs if cost.calls]
    for name, seconds in trainer.tracker_seconds.items():
        rows.append((seconds, (f"tracker {name}", "", "", f"{seconds:.3f}", "", "", _share(seconds, total), "")))
    shown = [cells for seconds, cells in sorted(rows, key=lambda row: -row[0]) if seconds >= least_share * total]
    cells = [row if synchronizations else row[:-1] for row in (_COLUMNS, *shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)),
                   *(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))]).rstrip()
        for row in cells
    ]  # fmt: skip
    return "\n".join(lines)


def _row(cost: Cost, total: float) -> tuple[float, tuple[str, ...]]:
    mean = cost.seconds / cost.calls
    numbers = f"{cost.calls}", f"{cost.seconds:.3f}", f"{1e3 * mean:.3f}", f"{1e3 * cost.longest:.3f}"
    return cost.seconds, (
        cost.owner, cost.event, *numbers, _share(cost.seconds, total), str(cost.synchronizations)
    )  # fmt: skip


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.1f} %" if total > 0 else ""
