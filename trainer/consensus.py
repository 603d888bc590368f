"""`Consensus`: the vectors of a run, and what all its processes conclude from each of them.

Whatever a vector is sent for, its rows bring the same: requests to end, what each process has seen of the data, and
its counters. So these conclusions are drawn here, in one place; what a vector decides beside them, its sender reads
out of the rows.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..callbacks.callback import ControlFlow, EndEpoch, NonFiniteSkip, NonFiniteStop, SkipBatch, StopRun
from ..distributed.exchange import PendingVector, exchange, start_vector
from .rows import NOTHING, Flag, Row, flags_of, saying

if TYPE_CHECKING:
    from .run import Run


class Consensus:
    """Sends this process's rows and reads those of all.

    Args:
        run: of this process; its counters and the reason of its end become those of all.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._share = run.strategy.data_share
        self.stops = False
        """Whether all have agreed to end the run."""
        self.knows_signal = False
        """Whether all know of a signal that asked for it."""
        self.ends_pass = False
        """Whether all have agreed to end the running pass."""
        self.nonfinite_elsewhere = False
        """Whether another process dropped the step of the open window for a value that is not finite."""
        self.nonfinite_here = False
        """Whether this one did."""
        self.samples = self.tokens = 0
        """What this process has seen since its last vector."""
        self._flags = NOTHING
        """What this process will say in its next vector, beside what that is sent for."""
        self._warned_of_end = False

    def ask_for(self, flow: ControlFlow | None) -> None:
        """Ask all, in the next vector, for what control flow asks for on this process. Local."""
        if isinstance(flow, (NonFiniteSkip, NonFiniteStop)):
            self._flags |= Flag.NONFINITE
            self.nonfinite_here = True
        if isinstance(flow, SkipBatch):
            self._flags |= Flag.SKIP
        elif isinstance(flow, EndEpoch):
            self._flags |= Flag.END_EPOCH
        elif isinstance(flow, StopRun):
            self._flags |= Flag.STOP_NOW
            self._run.heed(flow)

    def ask_for_parts(self) -> None:
        """Ask all, in the next vector, to train batches in parts that are as small as here. Local."""
        self._flags |= Flag.SPLIT

    def exchange(self, operation: str, flags: int = NOTHING, *, size: float = 0.0) -> list[Row]:
        """Send a row and wait for those of all, process 0 first. Collective."""
        return self.read(self.send(operation, flags, size=size))

    def send(self, operation: str, flags: int, *, size: float = 0.0, count: float = 0.0) -> PendingVector:
        """Send a row, with what is known by now beside the flags, and don't wait. Collective with `read`.

        Args:
            operation: what reports call it.
            flags: what the row says beside what was asked for.
            size: see `Row.size`.
            count: see `Row.loss_count`.
        """
        run, state = self._run, self._run.state
        flags, self._flags = flags | self._flags, NOTHING
        if run.stop_reason is not None and not self.stops:
            flags |= Flag.STOP
        if run.signal is not None:
            flags |= Flag.SIGNAL
        samples, tokens, self.samples, self.tokens = self.samples, self.tokens, 0, 0
        row = Row(flags, state.own_seconds, size, count, samples, tokens, state.batch, state.micro_step)
        return start_vector(row, operation)

    def read(self, pending: PendingVector) -> list[Row]:
        """The rows of all, process 0 first, after the conclusions from them. Collective.

        Once all have agreed to end the run, one more message tells why; and one how small the parts of batches are to
        be, where memory ran out.
        """
        rows = list(map(Row._make, pending.read()))
        state, flags = self._run.state, flags_of(rows)
        state.agreed_seconds = rows[0].seconds  # one clock for all
        _, _, _, _, samples, tokens, batches, micro_steps = zip(*rows, strict=True)
        state.samples += int(sum(self._share.by_batches(samples)))
        state.tokens += int(sum(self._share.by_batches(tokens)))
        # Windows of different length, where the data does not divide evenly: the longest counts.
        state.batch, state.micro_step = int(max(batches)), int(max(micro_steps))
        if flags & Flag.ENDED and not self.ends_pass:
            self.ends_pass = True
            self._warn_of_end(rows)
        is_new_signal = flags & Flag.SIGNAL and not self.knows_signal
        if is_new_signal or (flags & (Flag.STOP | Flag.STOP_NOW) and not self.stops):
            self.stops = True
            self._agree_on_reason()
        if flags & Flag.SPLIT:
            self._agree_on_parts()
        if flags & Flag.NONFINITE and not self.nonfinite_here:
            self.nonfinite_elsewhere = True
        return rows

    def _agree_on_reason(self) -> None:
        run = self._run
        told = exchange({"reason": run.stop_reason, "signal": run.signal}, "agree on why the run ends")
        if signals := [each["signal"] for each in told if each["signal"] is not None]:
            self.knows_signal = True
            run.note_signal(signals[0])
        reasons = [each["reason"] for each in told]
        index, reason = next((i, r) for i, r in enumerate(reasons) if r is not None)
        if any(each != reason for each in reasons):
            run.stop_reason = reason if reasons[0] == reason else f"process {index}: {reason}"

    def _agree_on_parts(self) -> None:
        training = self._run.training
        splitting = None if training is None else training.splitting
        sizes = exchange(None if splitting is None else splitting.sizes.most, "agree on the parts of batches")
        if splitting is not None:
            splitting.sizes.most = min(size for size in sizes if size is not None)

    def _warn_of_end(self, rows: list[Row]) -> None:
        ended = saying(Flag.ENDED, rows)
        if len(ended) < len(rows) and not self._warned_of_end and rows[0].micro_step > 0:
            self._warned_of_end = True
            warnings.warn(
                f"the data of processes {ended} ended in epoch {self._run.state.epoch} while others had more, which is "
                "left out: an epoch ends with the first process. Give each process as many batches.",
                stacklevel=2,
            )
