"""What the losses of a pipeline weigh, whose gradients are added up before backward is called."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed.errors import ConfigError, TaskError
from .pipeline_layers import Loss

_ROUNDING = 1e-6
"""How far two weights may be apart that are meant to be equal."""


class Weighing:
    """The weight that the gradients of a window were computed with, and the loss that backward is still to come from.

    A batch's gradients are computed with the weight of the batch before. In a window's first batch there are no others,
    and all are multiplied when backward tells the right one.
    """

    def __init__(self) -> None:
        self._pending: Tensor | None = None
        """A loss whose gradients were added, and from which backward was not called yet."""
        self.weight = 1.0
        """What losses were multiplied with last, beside the division by the window's size."""
        self._is_first = True
        """Whether the newest batch was the first of its window."""
        self._factor: float | None = None
        """What the gradients that were added in this window were multiplied with; None: there are none."""

    def factor(self, window_size: int) -> float:
        """What the loss of the next batch is multiplied with. Local."""
        return self.weight / window_size if self._factor is None else self._factor

    def added(self, loss: Loss, factor: float) -> Loss:
        """Take note that the gradients of a batch were added, with a factor. Local.

        Returns:
            The loss, from which backward may begin.
        """
        self._is_first, self._factor = self._factor is None, factor
        self._pending = (loss if isinstance(loss, Tensor) else loss[0]).requires_grad_()
        return loss

    def settle(self, loss: Tensor, window_size: int) -> float:
        """What the gradients of the window are to be multiplied with, now that backward begins from a loss. Local.

        Raises:
            TaskError: it is another loss, or it weighs otherwise than those of the batches before in the window.
        """
        weight = _weight_of(loss, self._pending)
        self._pending = None
        assert self._factor is not None
        before, factor = self._factor, weight / window_size
        if factor == before:
            return 1.0
        if self._is_first:
            self._factor, self.weight = factor, weight or 1.0
            return factor / before
        if abs(factor - before) > _ROUNDING * abs(before):
            raise TaskError(
                f"training_step multiplied the loss of self.run_pipeline(batch) with {weight:g}, and with "
                f"{before * window_size:g} for batches before in the same window. With strategy='pipeline' these weigh "
                "alike: let pipeline_loss return (loss_sum, count), or weigh inside it."
            )
        return 1.0

    def close(self) -> None:
        """The window has ended, or its gradients were dropped. Local."""
        self._factor = None

    def forget(self) -> None:
        """Forget a batch whose backward never came. Local."""
        self._pending = self._factor = None

    def check_settled(self) -> None:
        """Refuse to go on where a batch's gradients were added and backward was not called. Local.

        Raises:
            ConfigError: says what may have happened.
        """
        if self._pending is not None:
            raise ConfigError(
                "a batch was left out after self.run_pipeline(batch), by SkipBatch or a step without a loss, and with "
                "strategy='pipeline' its gradients are added up by then. Leave it out before, or call run_pipeline "
                "once."
            )


def _weight_of(loss: Tensor, pending: Tensor | None) -> float:
    """What a loss is multiplied with in the one that backward begins from. Local.

    Args:
        loss: a scalar that was made of `pending` alone.
        pending: what `run_pipeline` gave, a scalar whose gradients were computed; None: nothing.
    Raises:
        TaskError: it was made of other things, whose gradients nobody has.
    """
    if loss is pending:
        return 1.0
    if pending is None or _leaves(loss) != {id(pending)}:
        raise TaskError(
            "training_step returned another loss than self.run_pipeline(batch) gave, and with strategy='pipeline' "
            "gradients are computed there. Return that one, or a multiple of it; put what is to be added into "
            "pipeline_loss."
        )
    return float(torch.autograd.grad(loss, pending)[0])


def _leaves(loss: Tensor) -> set[int]:
    """The tensors that backward from a loss comes to, by `id`. Local."""
    if loss.grad_fn is None:
        return {id(loss)}
    found: set[int] = set()
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return found
