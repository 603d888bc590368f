"""`Start`: what a micro-batch begins with, to be put back where memory runs out in it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.memory import clear_device_cache
from ..distributed.nested import named_tensors
from ..distributed.random import get_random_state, set_random_state
from .metric_state import log_tree, restore_log
from .optimizer_step import forget_gradients
from .snapshots import copied

if TYPE_CHECKING:
    from .run import Run, Training


class Start:
    """What a micro-batch begins with, to be put back where memory runs out in it. Copies are on the host.

    Args:
        run: of this process.
        training: its training, between two micro-batches.
        batch: the micro-batch, whose tensors a step may change in place; None where this process has none.
    """

    def __init__(self, run: Run, training: Training, batch: Any) -> None:
        self._run, self._training = run, training
        self.has_gradients = has_gradients(training)
        """Whether earlier micro-batches of the window have left some."""
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        if self.has_gradients:
            self._gradients = [(p, None if p.grad is None else _copied(p.grad)) for p in run.task.parameters()]
        self._unreduced = {name: _copied(each) for name, each in run.strategy.unreduced_gradients(run.model).items()}
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
        if self._unreduced:
            run.strategy.restore_unreduced(run.model, {name: each.clone() for name, each in self._unreduced.items()})
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


def has_gradients(training: Training) -> bool:
    """Whether earlier micro-batches of the open window have gone backward."""
    return training.passes > 0 or training.carried > 0


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _put_back(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a tensor where it has another one: not all can be written into, expanded ones for example."""
    value = value.to(tensor.device)
    if tensor.layout is not torch.strided or not torch.equal(tensor, value):
        tensor.copy_(value)
