"""The passes of a micro-batch that is trained in parts, and what they count as together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..callbacks.callback import ControlFlow, NonFiniteSkip, SkipBatch
from ..distributed.errors import TaskError
from ..distributed.memory import should_reduce_batch_size
from .clock import now
from .loop import backward, learn_from
from .loss import WindowLoss
from .optimizer_step import forget_gradients
from .part_start import has_gradients
from .parts import Part, joined, without_graph

if TYPE_CHECKING:
    from .run import Run, Training


class PassContext(Protocol):
    """What a strategy needs around the passes of a micro-batch's parts."""

    @property
    def can_take_back(self) -> bool:
        """Whether the gradients of parts are this process's own until the last one, so that they can be forgotten."""

    def around(self, *, is_last: bool) -> AbstractContextManager[None]:
        """A context for the forward and backward pass of a part."""


class Alone:
    """Those of parts that this process trains by itself. The last one reduces gradients, where the micro-batch does.

    Args:
        run: of this process.
    """

    can_take_back = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reduces = run.agreement is not None and run.gradient_state.sync_gradients

    def around(self, *, is_last: bool) -> AbstractContextManager[None]:
        return gathering(self._run) if self._reduces and not is_last else nullcontext()


def train_parts(run: Run, training: Training, parts: list[Part], index: int, context: PassContext) -> Any:
    """Forward and backward of a micro-batch. Gives what `training_step` returned, or would have for all of it.

    Raises:
        SkipBatch: the batch is left out.
        TaskError: what the parts gave can't be put together.
    """
    if len(parts) == 1:
        with context.around(is_last=True):
            began = now()
            outputs = training.step(parts[0].batch, index)
            run.clock.forward += now() - began
            learn_from(run, training, outputs)
        return outputs
    log, loss, passes = run.training_log, copy.copy(training.loss), training.passes
    samples, found = log.samples, []
    try:
        for part in parts:
            log.samples = part.samples
            with context.around(is_last=part is parts[-1]):
                found.append(_train_part(run, training, part, index, loss))
    except SkipBatch as skip:
        _leave_out(run, training, loss, passes, skip, context)
        raise
    except Exception as error:
        _say_where(error, part, index)
        raise
    finally:
        log.samples = samples
        training.passes = passes + (training.passes > passes)
    _count_none(training, loss, len(parts))
    return joined(found, parts)


def _train_part(run: Run, training: Training, part: Part, index: int, before: WindowLoss) -> Any:
    """Forward and backward of a part, whose loss weighs as many samples as it has."""
    began = now()
    outputs = training.step(part.batch, index)
    run.clock.forward += now() - began
    window = training.loss
    loss = window.take(outputs)
    if loss is not None:
        window.num_losses = before.num_losses + 1  # those of all parts are one
        if window.count is not None and window.reference is None:  # a sum, divided by the count of a part
            backward(run, loss)
        else:
            if window.count is not None:  # a sum, divided by the count of a batch: callbacks see one of this size
                loss = loss / part.share
            backward(run, loss, gradient=torch.full_like(loss, part.share))
    return without_graph(outputs)


def _say_where(error: Exception, part: Part, index: int) -> None:
    """Say that an error is one of a part, where it may be one that the whole batch would not have brought."""
    if not isinstance(error, ControlFlow) and not should_reduce_batch_size(error):
        error.add_note(
            f"auto_accumulate: in a part of batch {index}, {part.samples} of its samples, since memory had run out "
            "before. A batch is cut in the first dimension of its tensors; where that is not its samples, "
            "override Task.count_samples, and memory that runs out is an error."
        )


def _count_none(training: Training, before: WindowLoss, num_parts: int) -> None:
    """Count a batch whose parts gave no loss, once.

    Raises:
        TaskError: some gave one and others none, so that the mean over those that count can't be told.
    """
    num_none = training.loss.num_none - before.num_none
    if 0 < num_none < num_parts and training.loss.count is None:
        raise TaskError(
            f"training_step returned None for {num_none} of {num_parts} parts of a batch, and a mean loss for the "
            "others, of which it can't be told what they are the mean of. Return (loss_sum, count), or a loss of 0 "
            "times a parameter."
        )
    training.loss.num_none = before.num_none + (num_none == num_parts)


def _leave_out(
    run: Run, training: Training, loss: WindowLoss, passes: int, skip: SkipBatch, context: PassContext
) -> None:
    """Leave a batch out of its window whose first parts may have gone backward.

    Raises:
        TaskError: their gradients can't be told from those of the micro-batches before.
    """
    has_gone_back = training.passes > passes
    training.passes = passes
    if has_gone_back and not has_gradients(training) and context.can_take_back:
        forget_gradients(run, training)
    elif has_gone_back and not isinstance(skip, NonFiniteSkip):  # at which the whole step is dropped
        raise TaskError(
            f"SkipBatch in a part of batch {run.state.batch} whose first parts have gone backward, together with the "
            "micro-batches before it, or with those of other processes. With auto_accumulate raise it for the first "
            "part already, or in on_batch_start; or use accumulate=1."
        ) from skip
    training.loss = loss


@contextmanager
def gathering(run: Run) -> Iterator[None]:
    """A context whose backward passes reduce nothing, also in the last micro-batch of a window."""
    with holding(run), run.strategy.no_sync(run.model):
        yield


@contextmanager
def holding(run: Run) -> Iterator[None]:
    """A context in which no backward pass is the last one of its window, which sends the processes' vectors."""
    state = run.gradient_state
    before, state.sync_gradients = state.sync_gradients, False
    try:
        yield
    finally:
        state.sync_gradients = before
