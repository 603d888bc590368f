"""`Splitting`: batches that are too large for the memory go through the model in parts, with the same result.

It takes the place of the one forward and backward pass of a micro-batch. Where memory runs out in it, all that it has
changed is put back, and it is done again in parts of half the size, as all micro-batches are from then on. It stays one
micro-batch: its parts weigh as many samples as they have, and are counted and logged as the batch that they are.

How much of a batch a process computes at once changes nothing of its gradient. So a process that ran out of memory goes
on alone, while the others wait for its gradients, and tells them in the window's vector: then all take smaller parts.
Two things must not be left in their middle, as others take part in them. The sharing of buffers, with which the first
forward pass of a window begins, is done before what may fail. The reduction of gradients in the last backward of a
window waits until all has fitted, unless a batch of this size did so before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks.callback import ControlFlow, NonFiniteSkip, SkipBatch
from ..distributed.errors import DataError, TaskError
from ..distributed.memory import clear_device_cache, should_reduce_batch_size
from ..distributed.nested import named_tensors
from ..distributed.random import get_random_state, set_random_state
from .clock import now
from .loop import backward, learn_from
from .loss import WindowLoss
from .metric_state import log_tree, restore_log
from .optimizer_step import forget_gradients
from .parts import Part, count_rows, cut, extent_of, joined, whole, without_graph
from .snapshots import copied

if TYPE_CHECKING:
    from .run import Run, Training


class Splitting:
    """Trains the micro-batches of one run, in parts where whole ones don't fit into memory."""

    def __init__(self) -> None:
        self.size: int | None = None
        """The most samples that go through the model at once; None: whole batches."""
        self._fitted: dict[Hashable, list[tuple[int, ...]]] = {}
        """Of each kind of parts the largest sizes that have fitted."""

    def train(self, run: Run, training: Training, batch: Any, index: int) -> Any:
        """Forward and backward of a micro-batch. Gives what `training_step` returned, or would have for all of it.

        Raises:
            SkipBatch: the batch is left out.
            RuntimeError: memory ran out, and smaller parts can't help; a note says why, and what to do.
            TaskError: what the parts gave can't be put together.
        """
        parts = self._cut(training, batch)
        if self._has_fitted(training, parts):
            try:
                return _train(run, training, parts, index)
            except RuntimeError as error:
                if should_reduce_batch_size(error):
                    error.add_note(_LATE)
                raise
        run.strategy.share_buffers(run.model)
        start = _Start(run, training, batch)
        with nullcontext() if run.agreement is None else _gathering(run):
            outputs = self._try(run, training, batch, index, start)
        if run.state.step:  # before the first one the optimizer has no state yet
            self._note_fitted(training, start, self._cut(training, batch))
        return outputs

    def _try(self, run: Run, training: Training, batch: Any, index: int, start: _Start) -> Any:
        """Train a micro-batch in as few parts as fit."""
        while True:
            try:
                return _train(run, training, self._cut(training, batch), index)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                self._halve(run, training, batch, error)
            start.restore()  # here, where the error is gone, and with it what its frames held

    def _cut(self, training: Training, batch: Any) -> list[Part]:
        """The parts in which a batch is trained: itself, where it is small enough or can't be cut."""
        if self.size is None:
            return whole(batch)
        try:
            rows = count_rows(batch, training.count_samples)
            return whole(batch) if rows <= self.size else cut(batch, rows, self.size)
        except DataError:
            return whole(batch)  # it may fit; else `_halve` raises this

    def _halve(self, run: Run, training: Training, batch: Any, error: RuntimeError) -> None:
        """Take parts of half the size from now on, and say so.

        Raises:
            RuntimeError: the error itself, where that can't be.
        """
        try:
            rows = count_rows(batch, training.count_samples)
            cut(batch, rows, rows)
        except DataError as reason:
            error.add_note(f"auto_accumulate can't train this batch in parts: {reason}")
            raise error from None
        before = rows if self.size is None else min(rows, self.size)
        if before <= 1:
            error.add_note(_ONE_SAMPLE)
            raise error
        self.size = (before + 1) // 2
        if run.agreement is not None:
            run.agreement.consensus.ask_for_parts()
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"auto_accumulate: behind step {run.state.step}, in batch {run.state.batch} of epoch {run.state.epoch}, "
            f"memory ran out with {before} samples at once. From now on at most {self.size} go through the model at "
            f"once, with the same result. ({text:.400})",
            stacklevel=2,
        )

    def _has_fitted(self, training: Training, parts: list[Part]) -> bool:
        found = _extent(parts, has_gradients=_has_gradients(training))
        if found is None:
            return False
        kind, sizes = found
        return any(_is_within(sizes, known) for known in self._fitted.get(kind, ()))

    def _note_fitted(self, training: Training, start: _Start, parts: list[Part]) -> None:
        if (found := _extent(parts, has_gradients=start.has_gradients)) is not None:
            kind, sizes = found
            others = [known for known in self._fitted.get(kind, ()) if not _is_within(known, sizes)]
            self._fitted[kind] = [*others, sizes]


class _Start:
    """What a micro-batch begins with, to be put back where memory runs out in it. Copies are on the host.

    Args:
        run: of this process.
        training: its training, between two micro-batches.
        batch: the micro-batch, whose tensors a step may change in place.
    """

    def __init__(self, run: Run, training: Training, batch: Any) -> None:
        self._run, self._training = run, training
        self.has_gradients = _has_gradients(training)
        """Whether earlier micro-batches of the window have left some."""
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        if self.has_gradients:
            self._gradients = [(p, None if p.grad is None else _copied(p.grad)) for p in run.task.parameters()]
        self._buffers = [(module, dict(module._buffers)) for module in run.task.modules()]
        of_batch = [each for _, each in named_tensors(batch) if each.layout is torch.strided and not each.is_nested]
        self._values = [(each, _copied(each)) for each in (*run.task.buffers(), *of_batch)]
        self._random = get_random_state(run.device)
        self._log = copied(log_tree(run.training_log, run.task))
        self._samples = run.training_log.samples
        self._loss = copy.copy(training.loss)
        self._passes = training.passes

    def restore(self) -> None:
        """Put it back, as often as needed."""
        run, training, log = self._run, self._training, self._run.training_log
        forget_gradients(run, training)
        clear_device_cache(garbage_collection=True)
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value in self._values:
            _put_back(tensor, value)
        set_random_state(self._random, run.device)
        log.metrics.clear()
        restore_log(log, [copied(self._log)], run.task, run.device)
        log.samples = self._samples
        training.loss, training.passes = copy.copy(self._loss), self._passes


def _train(run: Run, training: Training, parts: list[Part], index: int) -> Any:
    """Forward and backward of a micro-batch. The last backward of a window reduces gradients, in its last part."""
    if len(parts) == 1:
        began = now()
        outputs = training.step(parts[0].batch, index)
        run.clock.forward += now() - began
        learn_from(run, training, outputs)
        return outputs
    log, loss, passes = run.training_log, copy.copy(training.loss), training.passes
    samples, reduces = log.samples, run.agreement is not None and run.gradient_state.sync_gradients
    found: list[Any] = []
    try:
        for part in parts:
            log.samples = part.samples
            with _gathering(run) if reduces and part is not parts[-1] else nullcontext():
                found.append(_train_part(run, training, part, index, loss))
    except SkipBatch as skip:
        _leave_out(run, training, loss, passes, skip)
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


def _leave_out(run: Run, training: Training, loss: WindowLoss, passes: int, skip: SkipBatch) -> None:
    """Leave a batch out of its window whose first parts may have gone backward.

    Raises:
        TaskError: their gradients can't be told from those of the micro-batches before.
    """
    has_gone_back = training.passes > passes
    training.passes = passes
    if has_gone_back and not _has_gradients(training):
        forget_gradients(run, training)
    elif has_gone_back and not isinstance(skip, NonFiniteSkip):  # at which the whole step is dropped
        raise TaskError(
            f"SkipBatch in a part of batch {run.state.batch} whose first parts have gone backward, together with the "
            "micro-batches before it. With auto_accumulate raise it for the first part already, or in on_batch_start; "
            "or use accumulate=1."
        ) from skip
    training.loss = loss


@contextmanager
def _gathering(run: Run) -> Iterator[None]:
    """A context whose backward passes reduce nothing, also in the last micro-batch of a window."""
    state = run.gradient_state
    before, state.sync_gradients = state.sync_gradients, False
    try:
        with run.strategy.no_sync(run.model):
            yield
    finally:
        state.sync_gradients = before


def _extent(parts: list[Part], *, has_gradients: bool) -> tuple[Hashable, tuple[int, ...]] | None:
    """Of which kind the largest part is, and how large; None where that can't be told."""
    found = extent_of(parts[0].batch)
    return None if found is None else ((has_gradients, found[0]), found[1])


def _has_gradients(training: Training) -> bool:
    """Whether earlier micro-batches of the open window have gone backward."""
    return training.passes > 0 or training.carried > 0


def _is_within(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(size <= other for size, other in zip(sizes, others, strict=True))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _put_back(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a tensor where it has another one: not all can be written into, expanded ones for example."""
    value = value.to(tensor.device)
    if tensor.layout is not torch.strided or not torch.equal(tensor, value):
        tensor.copy_(value)


_ONE_SAMPLE = (
    "auto_accumulate: the memory does not suffice for one sample. Use shorter samples, a smaller model, recomputation, "
    "precision='bf16', or strategy='fsdp'; trainer.plan(..., device_memory=) tells what fits."
)
_LATE = (
    "auto_accumulate: a batch as large as this one has fitted before, so that nothing was kept to do it again with. "
    "Something else takes more memory now, or what is free lies in pieces. Use smaller batches, or "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
