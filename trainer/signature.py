"""How a task's step wants to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..distributed.errors import TaskError
from ..strategies.precision import Precision


def bind_step(step: Callable[..., Any], precision: Precision, dataloader_idx: int = 0) -> Callable[[Any, int], Any]:
    """A task's step as the loops call it: with a batch and its index, in the run's precision.

    Raises:
        TaskError: it takes other arguments.
    """
    called = batch_function(step, dataloader_idx)
    if not precision.autocasts:
        return called

    def in_autocast(batch: Any, index: int) -> Any:
        with precision.autocast():
            return called(batch, index)

    return in_autocast


def batch_function(step: Callable[..., Any], dataloader_idx: int = 0) -> Callable[[Any, int], Any]:
    """A step as a function of a batch and its index.

    Args:
        step: a method that takes the batch; also the index, if it has a second argument; also `dataloader_idx`.
        dataloader_idx: the loader's number, for a step that asks for it.
    Raises:
        TaskError: it takes anything else.
    """
    parameters = list(inspect.signature(step).parameters.values())
    names = [p.name for p in parameters]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if "dataloader_idx" in names:
        return lambda batch, index: step(batch, index, dataloader_idx=dataloader_idx)
    if len(required) <= 2 and (len(positional) >= 2 or takes_any):
        return step
    if len(positional) == 1 and len(required) == 1:
        return lambda batch, index: step(batch)
    raise TaskError(
        f"{getattr(step, '__qualname__', step)} takes {names}. Expected (batch, batch_idx), (batch), or "
        "(batch, batch_idx, dataloader_idx)."
    )
