"""`RollCall`: what the processes of a run tell each other in the middle of an evaluation.

Each goes through batches of its own, of which others may have more or fewer, so that they can't meet at every batch.
Yet a signal to one of them, or `StopRun` out of a callback, ends the evaluation on all, and on all behind the same
batch: a step may have collectives of its own. So the roll is called about twice a second, at least one batch apart.

A call is sent behind a batch and read where the next one is sent, so that it travels while batches are computed. All
read the same rows and conclude the same from them: whether they leave here, whether all are done, and behind how many
batches the next call comes. A process that has no batch left goes on with batches that are none, until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from ..callbacks.callback import StopRun
from ..distributed.exchange import PendingVector
from .consensus import Consensus
from .rows import NOTHING, Flag, Row, flags_of

if TYPE_CHECKING:
    from .run import Run

PACE_SECONDS = 0.5
"""From one call to the next, as far as batches allow it."""
_SHORTEST = 1e-6


class RollCall:
    """Calls the roll in the evaluations of one run.

    Args:
        consensus: sends and reads the rows.
        leave: raises `StopRun` as what all have agreed on.
    """

    def __init__(self, consensus: Consensus, leave: Callable[[], NoReturn]) -> None:
        self._consensus = consensus
        self._leave = leave
        self._interval = 1  # batches from one call to the next, kept from one evaluation to the next
        self._num_batches = self._next = 0
        self._pending: PendingVector | None = None
        self._seconds: float | None = None
        self.is_over = False
        """Whether all are done, or have agreed to leave."""

    def begin(self) -> None:
        """An evaluation begins. Local, on all processes.

        Raises:
            StopRun: all know of a signal.
        """
        self._num_batches, self._next = 0, self._interval
        self._pending, self._seconds = None, None
        self.is_over = self._consensus.knows_signal
        if self.is_over:
            self._leave()

    def skip(self) -> None:
        """Go to the batch of the next call, where no process has one before that. Local, on all processes."""
        self._num_batches = self._next - 1

    def after_batch(self, *, is_done: bool) -> None:
        """Call the roll if it is time to. Collective, on all processes behind the same batches.

        Args:
            is_done: this process has no batch left.
        Raises:
            StopRun: on all processes: one raised it, or got a signal.
        """
        self._num_batches += 1
        if self._num_batches < self._next:
            return
        if self._pending is not None:
            self._conclude(self._consensus.read(self._pending))
        if not self.is_over:
            self._pending = self._consensus.send("call the roll", Flag.DONE if is_done else NOTHING)
            self._next += self._interval

    def _conclude(self, rows: list[Row]) -> None:
        flags, are_done = flags_of(rows), all(int(row.flags) & Flag.DONE for row in rows)
        is_cut = self._consensus.knows_signal and not are_done
        if flags & Flag.STOP_NOW or is_cut:
            self.is_over = True
            self._leave()
        self.is_over = are_done
        before, self._seconds = self._seconds, rows[0].seconds
        if before is not None and not int(rows[0].flags) & Flag.DONE:
            wanted = self._interval * PACE_SECONDS / max(self._seconds - before, _SHORTEST)
            self._interval = int(min(max(wanted, 1), 2 * self._interval))


class Turns:
    """The batches of one evaluation on this process; made by `in_turns`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._roll_call = None if run.agreement is None else run.agreement.roll_call
        self._has_stepped = False  # in the batch that is not over

    def begin(self) -> None:
        """Before the first batch. Local.

        Raises:
            StopRun: a signal has asked for the end of the run before, with several processes on all of them.
        """
        if self._roll_call is not None:
            self._roll_call.begin()
        elif self._run.signal is not None:
            raise StopRun(self._run.stop_reason or "")

    def of(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same step, whose calls are known of."""
        if self._roll_call is None:
            return step

        def call(*args: Any) -> Any:
            self._has_stepped = True
            return step(*args)

        return call

    def after_batch(self) -> None:
        """A batch is over, with its events. Collective.

        Raises:
            StopRun: a signal asked for the end of the run, with several processes on all of them.
        """
        if self._roll_call is None:
            if self._run.signal is not None:
                raise StopRun(self._run.stop_reason or "")
            return
        self._has_stepped = False
        self._roll_call.after_batch(is_done=False)

    def finish(self, flow: StopRun | None) -> None:
        """This process has no batch left: take part in those of the others until all are done. Collective.

        Args:
            flow: what ended its batches early.
        Raises:
            StopRun: on all processes: the evaluation was cut.
        """
        roll_call, agreement = self._roll_call, self._run.agreement
        if roll_call is None or agreement is None:
            return
        if not roll_call.is_over:
            agreement.consensus.ask_for(flow)
        have_batches = True
        while not roll_call.is_over:
            if not self._has_stepped:
                have_batches = have_batches and self._run.strategy.sit_out_evaluation()
            self._has_stepped = False
            if not have_batches:
                roll_call.skip()
            roll_call.after_batch(is_done=True)


@contextmanager
def in_turns(run: Run, held: StopRun | None) -> Iterator[Turns]:
    """A context for all batches of an evaluation, also where one process ends them early. Collective.

    Args:
        run: of this process.
        held: what ends them before the first one.
    Raises:
        StopRun: on all processes: the evaluation was cut.
    """
    turns = Turns(run)
    turns.begin()
    try:
        if held is not None:
            raise held
        yield turns
    except StopRun as flow:
        turns.finish(flow)
        raise
    turns.finish(None)
