"""`Splitting`: batches that are too large for the memory go through the model in parts, with the same result.

It takes the place of the one forward and backward pass of a micro-batch. Where memory runs out in it, all that it has
changed is put back, and it is done again in parts of half the size, as all micro-batches are from then on. It stays one
micro-batch: its parts weigh as many samples as they have, and are counted and logged as the batch that they are.

How much of a batch a process computes at once changes nothing of its gradient. So a process that ran out of memory goes
on alone, while the others wait for its gradients, and tells them in the window's vector: then all take smaller parts.
Two things must not be left in their middle, as others take part in them. The sharing of buffers, with which the first
forward pass of a window begins, is done before what may fail. The reduction of gradients in the last backward of a
window waits until all has fitted, unless a batch of this size did so before.

Where every process has a part in each pass, all split a micro-batch together: `splitting_together.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..distributed.errors import DataError
from ..distributed.memory import should_reduce_batch_size
from .part_passes import Alone, gathering, train_parts
from .part_start import Start, has_gradients
from .parts import Part, count_rows, cut, extent_of, whole

if TYPE_CHECKING:
    from .run import Run, Training


class Sizes:
    """How large the parts are in which one run trains its micro-batches, and which of them have fitted."""

    def __init__(self) -> None:
        self.most: int | None = None
        """The most samples that go through the model at once; None: whole batches."""
        self._fitted: dict[Hashable, list[tuple[int, ...]]] = {}
        """Of each kind of parts the largest sizes that have fitted."""

    def cut(self, training: Training, batch: Any) -> list[Part]:
        """The parts in which a batch is trained: itself, where it is small enough or can't be cut."""
        if self.most is None:
            return whole(batch)
        try:
            rows = count_rows(batch, training.count_samples)
            return whole(batch) if rows <= self.most else cut(batch, rows, self.most)
        except DataError:
            return whole(batch)  # it may fit; else `halve` raises this

    def halve(self, run: Run, training: Training, batch: Any, parts: list[Part], error: RuntimeError) -> None:
        """Take parts of half the size from now on, and say so.

        Args:
            run: of this process.
            training: its training.
            batch: that did not fit.
            parts: in which it did not.
            error: that said so.
        Raises:
            RuntimeError: the error itself, where that can't be.
        """
        try:
            rows = count_rows(batch, training.count_samples)
            cut(batch, rows, rows)
        except DataError as reason:
            error.add_note(f"auto_accumulate can't train this batch in parts: {reason}")
            raise error from None
        before = rows if parts[0].samples is None else parts[0].samples
        if before <= 1:
            error.add_note(_ONE_SAMPLE)
            raise error
        self.most = (before + 1) // 2
        if run.agreement is not None:
            run.agreement.consensus.ask_for_parts()
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"auto_accumulate: behind step {run.state.step}, in batch {run.state.batch} of epoch {run.state.epoch}, "
            f"memory ran out with {before} samples at once. From now on at most {self.most} go through the model at "
            f"once, with the same result. ({text:.400})",
            stacklevel=2,
        )

    def have_fitted(self, parts: list[Part], setting: Hashable) -> bool:
        """Whether parts of no smaller size have fitted.

        Args:
            parts: of a micro-batch.
            setting: what else their memory depends on.
        """
        found = _extent(parts, setting)
        if found is None:
            return False
        kind, sizes = found
        return any(_is_within(sizes, known) for known in self._fitted.get(kind, ()))

    def note_fitted(self, parts: list[Part], setting: Hashable) -> None:
        """Note that parts have fitted."""
        if (found := _extent(parts, setting)) is not None:
            kind, sizes = found
            others = [known for known in self._fitted.get(kind, ()) if not _is_within(known, sizes)]
            self._fitted[kind] = [*others, sizes]


class Splitting:
    """Trains the micro-batches of one run, in parts where whole ones don't fit into memory."""

    def __init__(self) -> None:
        self.sizes = Sizes()
        """Of the parts."""

    def train(self, run: Run, training: Training, batch: Any, index: int) -> Any:
        """Forward and backward of a micro-batch. Gives what `training_step` returned, or would have for all of it.

        Raises:
            SkipBatch: the batch is left out.
            RuntimeError: memory ran out, and smaller parts can't help; a note says why, and what to do.
            TaskError: what the parts gave can't be put together.
        """
        parts, setting, passes = self.sizes.cut(training, batch), has_gradients(training), training.passes
        if self.sizes.have_fitted(parts, setting):
            try:
                return train_parts(run, training, parts, index, Alone(run))
            except RuntimeError as error:
                note_late(error)
                raise
        run.strategy.share_buffers(run.model)
        start = Start(run, training, batch)
        with nullcontext() if run.agreement is None else gathering(run):
            outputs = self._try(run, training, batch, index, start)
        # Before the first step the optimizer has no state yet, and a batch without a loss has not gone backward.
        if run.state.step and training.passes > passes:
            self.sizes.note_fitted(self.sizes.cut(training, batch), setting)
        return outputs

    def train_nothing(self, run: Run, training: Training) -> bool:
        """Do what `train` does with other processes, in one that has no loss in a micro-batch. Collective where it is.

        Returns:
            Whether that was done: not here, where the strategy takes part.
        """
        return False

    def _try(self, run: Run, training: Training, batch: Any, index: int, start: Start) -> Any:
        """Train a micro-batch in as few parts as fit."""
        while True:
            parts = self.sizes.cut(training, batch)
            try:
                return train_parts(run, training, parts, index, Alone(run))
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                self.sizes.halve(run, training, batch, parts, error)
            start.restore()  # here, where the error is gone, and with it what its frames held


def note_late(error: RuntimeError) -> None:
    """Say of an error why nothing can be done about it, where it is that memory ran out in a pass that had fitted."""
    if should_reduce_batch_size(error):
        error.add_note(_LATE)


def _extent(parts: list[Part], setting: Hashable) -> tuple[Hashable, tuple[int, ...]] | None:
    """Of which kind the largest part is, and how large; None where that can't be told."""
    found = extent_of(parts[0].batch)
    return None if found is None else ((setting, found[0]), found[1])


def _is_within(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(size <= other for size, other in zip(sizes, others, strict=True))


_ONE_SAMPLE = (
    "auto_accumulate: the memory does not suffice for one sample. Use shorter samples, a smaller model, recomputation, "
    "precision='bf16', or strategy='fsdp'; trainer.plan(..., device_memory=) tells what fits."
)
_LATE = (
    "auto_accumulate: a batch as large as this one has fitted before, so that nothing was kept to do it again with. "
    "Something else takes more memory now, or what is free lies in pieces. Use smaller batches, or "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
