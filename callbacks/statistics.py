"""The running statistics of batch norms, computed anew for weights that no training step has seen, such as averages."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..distributed.numbers import wide_float
from ..distributed.operations import reduce
from ..distributed.random import preserved_random_state
from .callback import ControlFlow, SkipBatch
from .unlogged import unlogged

if TYPE_CHECKING:
    from .view import TrainerView


def trained_norms(task: Any) -> list[_BatchNorm]:
    """The batch norms that keep statistics and are in training mode now: those in eval mode were frozen on purpose."""
    return [m for m in task.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and m.training]


@torch.no_grad()
def recompute_statistics(
    trainer: TrainerView, task: Any, norms: Iterable[_BatchNorm], modes: Mapping[nn.Module, bool]
) -> None:
    """Replace running statistics by plain means over the batches of one pass of the training data. Collective.

    Each process takes its share of the data, and all get the same statistics: the means over the batches of all. The
    forward passes are those of `training_step`, whose losses and logged values go nowhere. No optimizer, scaler or
    schedule steps, no event fires, and random states are as before. A norm that no batch goes through keeps what it
    has, and so do all of them where an exception comes.

    Args:
        trainer: whose run it is.
        task: with the weights that the statistics are to be for.
        norms: whose statistics; the same on all processes.
        modes: each module's `training` flag during the pass.
    """
    kept = [(norm, [buffer.clone() for buffer in _statistics(norm)]) for norm in norms]
    try:
        with _in_modes(modes), _cumulative(norm for norm, _ in kept), unlogged(task):
            for norm, _ in kept:
                norm.reset_running_stats()
            with preserved_random_state(trainer.device):
                _pass_forward(trainer)
        _combine([norm for norm, _ in kept], [before for _, before in kept])
    except BaseException:
        for norm, before in kept:
            _put_back(norm, before)
        raise


def _pass_forward(trainer: TrainerView) -> None:
    with trainer.training_passes() as training_step:
        for index, batch in enumerate(trainer.training_batches()):
            try:
                training_step(batch, index)
            except SkipBatch:
                continue
            except ControlFlow:  # the end of the epoch, or of the run, as the task sees it
                break


def _combine(norms: list[_BatchNorm], before: list[list[Tensor]]) -> None:
    """Make the means over this process's batches those over the batches of all. Collective."""
    sums = []
    for norm in norms:
        mean, variance, batches = _statistics(norm)
        wide = wide_float(mean.device)
        sums.append([mean.to(wide) * batches, variance.to(wide) * batches, batches])
    totals = reduce(sums, "sum")
    counts = [int(count) for _, _, count in totals]
    if not any(counts):
        warnings.warn(
            "the statistics of batch norms were not computed anew: the training data gave no batch a second time. Pass "
            "an iterable that begins anew each time.",
            stacklevel=2,
        )
    for norm, kept, total, count in zip(norms, before, totals, counts, strict=True):
        if count:
            mean, variance, batches = _statistics(norm)
            mean.copy_(total[0] / count)
            variance.copy_(total[1] / count)
            batches.fill_(count)
        else:
            _put_back(norm, kept)


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def _put_back(norm: _BatchNorm, before: list[Tensor]) -> None:
    for buffer, copy in zip(_statistics(norm), before, strict=True):
        buffer.copy_(copy)


@contextmanager
def _cumulative(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """A context in which the running statistics are plain means over batches; torch's word for it is None."""
    momenta = [(norm, norm.momentum) for norm in norms]
    for norm, _ in momenta:
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum


@contextmanager
def _in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    before = [(module, module.training) for module in modes]
    for module, training in modes.items():
        module.training = training
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
