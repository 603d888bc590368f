"""`SplittingTogether`: micro-batches in parts, where every process has a part in each pass.

The processes agree before each micro-batch in how many passes it goes: as many as the one with the most parts needs.
Who has fewer of them, or no batch, makes empty passes for the rest. Where parts of this size have not fitted on all of
them yet, the passes are guarded (`Strategy.guarded`): all processes leave them where memory runs out on one, put back
what they have changed, and do the micro-batch again in as many passes as that one needs now.

The passes of a window's last micro-batch reduce their gradients, each of them: whole gradients of large models are what
would not fit. The window's vector waits until the passes are over, unless each process has a batch for the last one and
it is not guarded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ..callbacks.callback import ControlFlow
from ..distributed.errors import DataError
from ..distributed.exchange import start_vector
from ..distributed.memory import should_reduce_batch_size
from ..strategies.guard import LeftPass
from .auto_accumulate import Sizes, Splitting, note_late
from .part_passes import holding, train_parts
from .part_start import Start, has_gradients
from .parts import Part, count_rows, cut

if TYPE_CHECKING:
    from .run import Run, Training


class Plan(NamedTuple):
    """How processes train a micro-batch."""

    parts: list[Part]
    """Those of this process."""
    num_passes: int
    """How many passes all make."""
    is_guarded: bool
    """Whether they may leave them."""
    is_held: bool
    """Whether the window's vector waits until the passes are over."""


class SplittingTogether(Splitting):
    """Trains the micro-batches of one run in turns with the other processes."""

    def __init__(self) -> None:
        super().__init__()
        self._is_made = False
        """Whether the passes of the micro-batch that closes the open window are made, and its vector is not sent."""
        self._is_open = False
        """Whether the last of them is to go backward yet, without a loss, behind the vector."""

    def train(self, run: Run, training: Training, batch: Any, index: int) -> Any:
        """Forward and backward of a micro-batch, as `Splitting.train` gives it. Collective.

        Raises:
            SkipBatch, EndEpoch, StopRun: as they came, once all passes are made.
            RuntimeError: memory ran out, and smaller parts can't help; a note says why, and what to do.
            TaskError: what the parts gave can't be put together.
        """
        turn = _Turn(run, training, batch, index)
        reduces, passes = run.gradient_state.sync_gradients, training.passes
        try:
            return turn.train(self.sizes)
        finally:
            training.passes = passes + 1
            self._is_open = turn.is_open
            self._is_made = reduces and not turn.is_open and not run.agreement.is_sent  # type: ignore[union-attr]

    def train_nothing(self, run: Run, training: Training) -> bool:
        """The passes of a micro-batch of which this process has nothing, unless they are made by now. Collective."""
        if self._is_open:
            self._is_open = False
            return False
        if self._is_made:
            self._is_made = False
            return True
        passes = training.passes
        _Turn(run, training, None, run.state.batch).train(self.sizes)
        training.passes = passes
        return True


class _Turn:
    """One micro-batch of one process.

    Args:
        run: of this process.
        training: its training.
        batch: the micro-batch; None: it has none.
        index: of the batch.
    """

    def __init__(self, run: Run, training: Training, batch: Any, index: int) -> None:
        self._run, self._training = run, training
        self._batch, self._index = batch, index
        self._reduces = run.gradient_state.sync_gradients
        self._setting = has_gradients(training), self._reduces
        self._flow: ControlFlow | None = None
        """What this process leaves the micro-batch with, when all passes are made."""
        self._num_made = 0
        """Passes of the newest attempt that are made."""
        self._num_losses = 0
        """How many of them had a loss of this process."""
        self._is_held = True
        self.is_open = False
        """Whether the last pass is to go backward yet: behind the window's vector, as that of the others does."""

    @property
    def can_take_back(self) -> bool:
        """See `PassContext`."""
        return not self._reduces

    def train(self, sizes: Sizes) -> Any:
        """Make its passes. Collective."""
        plan = self._agree(sizes)
        try:
            outputs = self._try(sizes, plan) if plan.is_guarded else self._make(plan)
        except RuntimeError as error:
            if not plan.is_guarded:
                note_late(error)
            raise
        if self._flow is not None:
            raise self._flow
        return outputs

    def _agree(self, sizes: Sizes) -> Plan:
        """Agree with the other processes on a plan. Collective."""
        parts = [] if self._batch is None or self._flow is not None else sizes.cut(self._training, self._batch)
        fits = not parts or sizes.have_fitted(parts, self._setting_of(parts))
        rows = start_vector([fits, len(parts)], "agree on the parts of a batch").read()
        counts = [int(count) for _, count in rows]
        most, is_guarded = max(*counts, 1), not all(fits for fits, _ in rows)
        return Plan(self._spread(parts, most), most, is_guarded, is_guarded or min(counts) < most)

    def _spread(self, parts: list[Part], num_passes: int) -> list[Part]:
        """Parts for as many passes as other processes need, where this one could do with fewer: so all need less."""
        if not 0 < len(parts) < num_passes:
            return parts
        try:
            rows = count_rows(self._batch, self._training.count_samples)
            return cut(self._batch, rows, -(-rows // num_passes)) if rows > 1 else parts
        except DataError:
            return parts

    def _setting_of(self, parts: list[Part]) -> Hashable:
        return (*self._setting, len(parts) > 1)

    def _try(self, sizes: Sizes, plan: Plan) -> Any:
        """Make the passes of a micro-batch guarded, in as few parts as fit on all processes. Collective."""
        run, training = self._run, self._training
        start = Start(run, training, self._batch)
        while True:
            try:
                with run.strategy.guarded(run.model):
                    outputs = self._make(plan)
                break
            except LeftPass:
                pass
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                if not plan.parts:
                    error.add_note(_NO_PART)
                    raise
                sizes.halve(run, training, self._batch, plan.parts, error)
            start.restore()  # here, where the error is gone, and with it what its frames held
            plan = self._agree(sizes)._replace(is_guarded=True, is_held=True)
        # Before the first step the optimizer has no state yet, and a part without a loss has not gone backward.
        if run.state.step and plan.parts and self._num_losses == len(plan.parts):
            sizes.note_fitted(plan.parts, self._setting_of(plan.parts))
        return outputs

    def _make(self, plan: Plan) -> Any:
        """Make the passes of a plan. Control flow that comes in them is kept until they are made. Collective."""
        run, outputs = self._run, None
        self._num_made, self._num_losses, self._is_held = 0, 0, plan.is_held
        with holding(run) if plan.is_held else nullcontext():
            if plan.parts:
                try:
                    outputs = train_parts(run, self._training, plan.parts, self._index, self)
                except ControlFlow as flow:
                    self._flow = flow.with_traceback(None)  # whose frames hold the graph
            self._make_rest(plan)
        return outputs

    def _make_rest(self, plan: Plan) -> None:
        """Make the passes for which this process has no part (any more). Collective."""
        while self._num_made < plan.num_passes and not self.is_open:
            if self._reduces and not plan.is_held and self._num_made == plan.num_passes - 1:
                self.is_open = True
            else:
                self._run.strategy.sit_out(self._run.model)
                self._num_made += 1

    @contextmanager
    def around(self, *, is_last: bool) -> Iterator[None]:
        """A context for the pass of a part, which goes backward also where it has no loss, as that of others does."""
        run, training = self._run, self._training
        passes = training.passes
        is_held = self._is_held or not is_last
        try:
            with holding(run) if is_held else nullcontext():
                yield
        except ControlFlow:
            self._end_pass(training.passes > passes, is_held)
            raise
        self._end_pass(training.passes > passes, is_held)

    def _end_pass(self, went_back: bool, is_held: bool) -> None:
        if not went_back and self._reduces and not is_held:
            self.is_open = True
            return
        if not went_back:
            self._run.strategy.sit_out(self._run.model)
        self._num_losses += went_back
        self._num_made += 1


_NO_PART = (
    "auto_accumulate: this process had no part of a batch in that pass, so that smaller ones don't help. Use a smaller "
    "model, or more processes."
)
