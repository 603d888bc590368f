"""What `training_step` returns, and the exact weighting of a window's losses."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..distributed.errors import TaskError
from ..distributed.numbers import wide_float


class WindowLoss:
    """Weights the losses of one window so that its gradient is exact.

    A mean loss weighs as much as the others of the window: each is divided by the window's size. A pair
    `(loss_sum, count)` weighs by its count: since the window's count is known only at its end, each sum is divided by
    the first count, and `correction` puts it right. Batches that are left out (None) are corrected for in the same way.
    """

    __slots__ = ("_divisor", "_newest_count", "_processes", "_size", "_total", "count", "num_losses", "num_none",
                 "reference")  # fmt: skip

    def __init__(self) -> None:
        self.num_none = 0
        """Batches of the whole run for which the step returned None."""
        self._total: tuple[float, Any] | None = None
        self.reference: float | None = None
        """What loss sums are divided by first, the same in all processes; None: by the window's first count."""
        self.begin(1)

    def refer_to(self, count: float) -> None:
        """Take the power of two near a typical count as the reference. It changes no bit of a result: divisions by
        powers of two are exact, and `correction` puts the size right.
        """
        self.reference = 2.0 ** round(math.log2(count)) if count > 0 else 1.0

    def begin(self, size: int) -> None:
        """A window of `size` micro-batches begins."""
        self._renew_reference()
        self._size = size
        self.num_losses = 0
        """Batches of the window that gave a loss."""
        self.count: Any = None
        """The sum of their counts, a number or a tensor on the device; None where steps return mean losses."""
        self._divisor: Any = None
        self._newest_count: Any = 0
        self._total = None
        self._processes = 1

    def leave_out(self) -> None:
        """The loss that was taken last will have no backward."""
        self.num_losses -= 1
        if self.num_losses == 0:
            self.count = self._divisor = None
        elif self.count is not None:
            self.count = self.count - self._newest_count

    def take(self, outputs: Any) -> Tensor | None:
        """The loss to run backward from, before its division by the window's size; None for a batch left out.

        Raises:
            TaskError: what the step returned is no loss.
        """
        if type(outputs) is Tensor or isinstance(outputs, Tensor):
            loss = outputs
            if self._divisor is not None:
                raise _mixed()
        elif outputs is None:
            self.num_none += 1
            return None
        elif isinstance(outputs, Mapping):
            if "loss" not in outputs:
                raise TaskError(f"training_step returned a mapping without 'loss'; it has {sorted(map(str, outputs))}.")
            return self.take(outputs["loss"])
        elif isinstance(outputs, tuple) and len(outputs) == 2:
            loss = self._weighted(*outputs)
        else:
            raise TaskError(
                f"training_step returned a {type(outputs).__name__}. Expected a scalar loss, a mapping with 'loss', "
                "a pair (loss_sum, count), or None to leave the batch out."
            )
        if not loss.requires_grad or (loss.ndim and loss.numel() != 1):
            raise _no_loss(loss)
        self.num_losses += 1
        return loss

    def _weighted(self, loss_sum: Any, count: Any) -> Tensor:
        if not isinstance(loss_sum, Tensor):
            raise TaskError(
                f"training_step returned ({type(loss_sum).__name__}, ...). Expected (loss_sum, count), the first a "
                "tensor."
            )
        if self.num_losses and self._divisor is None:
            raise _mixed()
        count = _read_count(count)
        if self._divisor is None:
            self._divisor, self.count = self.reference or _or_one(count), count
        else:
            self.count = self.count + count
        self._newest_count = count
        weighted: Tensor = loss_sum / self._divisor
        return weighted

    def share(self, num_losses: int, count: Any, processes: int) -> None:
        """Take what the window holds on all processes together, whose gradients are averaged.

        Args:
            num_losses: batches that gave a loss.
            count: the sum of all counts; None where steps return mean losses.
            processes: how many processes there are.
        """
        self._total, self._processes = (num_losses, count), processes
        if count is not None:
            self.count, self._divisor = count, self.reference

    def _renew_reference(self) -> None:
        """Keep to the counts of the window before; those on a device are not waited for."""
        if self.reference is not None and self._total is not None:
            num_losses, count = self._total
            if count is not None and not isinstance(count, Tensor) and num_losses:
                self.refer_to(count / num_losses)

    def correction(self) -> float | Tensor | None:
        """What the window's gradients are to be multiplied with at its end; None for nothing."""
        num_losses = self.num_losses if self._total is None else self._total[0]
        size = self._size * self._processes
        if self._divisor is None:
            return None if num_losses == size else size / num_losses
        factor: float | Tensor = self._divisor * size / _or_one(self.count)
        return None if not isinstance(factor, Tensor) and factor == 1 else factor


def _read_count(count: Any) -> Any:
    """A count that can be added to others without loss.

    Raises:
        TaskError: it is no number of at least 0. One that a device computes is not waited for.
    """
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_complex():
            raise _no_count(f"tensor of shape {tuple(count.shape)} and type {count.dtype}")
        count = count.detach().reshape(()).to(wide_float(count.device))  # a sum of small types would wrap or round
        if count.device.type == "cpu" and not 0 <= count.item() < math.inf:
            raise _no_count(f"tensor {count.item()}")
        return count
    if isinstance(count, bool) or not isinstance(count, numbers.Real) or not 0 <= float(count) < math.inf:
        raise _no_count(f"{type(count).__name__} {count!r}")
    return int(count) if isinstance(count, numbers.Integral) else float(count)


def _no_count(found: str) -> TaskError:
    return TaskError(f"training_step returned (loss_sum, count) with the {found}. Expected a number of at least 0.")


def _or_one(count: Any) -> Any:
    """A divisor: the count, or 1 for a window in which nothing counts and all sums are 0."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count, torch.ones_like(count))
    return count if count > 0 else 1


def _mixed() -> TaskError:
    return TaskError(
        "training_step returned a mean loss for one batch and (loss_sum, count) for another of the same window, which "
        "can't be weighted against each other. Return the same kind for every batch."
    )


def _no_loss(loss: Tensor) -> TaskError:
    if loss.ndim and loss.numel() != 1:
        return TaskError(
            f"training_step returned a loss of shape {tuple(loss.shape)}. Expected a scalar: take its mean, or return "
            "(loss.sum(), loss.numel())."
        )
    return TaskError(
        "training_step returned a loss without a gradient. Compute it from the task's parameters, outside "
        "torch.no_grad() and without detach(); are all parameters frozen?"
    )
