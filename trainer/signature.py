"""How a task's step wants to be called."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from ..data.sizes import find_batch_size
from ..distributed.errors import TaskError
from ..strategies.precision import Precision
from .task import Task


def bind_step(
    step: Callable[..., Any], precision: Precision, through: Callable[..., Any] | None = None, dataloader_idx: int = 0
) -> Callable[[Any, int], Any]:
    """A task's step as the loops call it: with a batch and its index, in the run's precision.

    Args:
        step: the task's method.
        precision: of the run.
        through: what is called in its place and passes the arguments on to it.
        dataloader_idx: the loader's number, for a step that asks for it.
    Raises:
        TaskError: it takes other arguments.
    """
    called = batch_function(step, dataloader_idx, through or step)
    if not precision.autocasts:
        return called

    def in_autocast(batch: Any, index: int) -> Any:
        with precision.autocast():
            return called(precision.convert_inputs(batch), index)

    return in_autocast


def sample_counter(task: Task) -> Callable[[Any], int | None]:
    """How many samples a batch of a task has: `find_batch_size`, or the task's own way, its answers checked."""
    own = type(task).count_samples is not Task.count_samples or "count_samples" in vars(task)
    return checked_count(task.count_samples) if own else find_batch_size


def checked_count(count: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A task's `count_samples` or `count_tokens` whose answers are integers.

    Raises:
        TaskError: when it is called: the answer is neither an integer of at least 0 nor None.
    """

    def checked(batch: Any) -> int | None:
        answer = count(batch)
        if answer is None or (type(answer) is int and answer >= 0):
            return answer
        try:
            number = operator.index(answer)  # a NumPy integer, or an integer tensor of one element
        except (TypeError, ValueError, RuntimeError):
            number = -1
        if number < 0 or isinstance(answer, bool):
            raise TaskError(f"{getattr(count, '__qualname__', count)} returned {answer!r}. Expected an integer >= 0.")
        return number

    return checked


def batch_function(
    step: Callable[..., Any], dataloader_idx: int = 0, called: Callable[..., Any] | None = None
) -> Callable[[Any, int], Any]:
    """A step as a function of a batch and its index.

    Args:
        step: a method that takes the batch; also the index, if it has a second argument; also `dataloader_idx`.
        dataloader_idx: the loader's number, for a step that asks for it.
        called: what is called with these arguments in its place.
    Raises:
        TaskError: it takes anything else.
    """
    parameters = list(inspect.signature(step).parameters.values())
    names = [p.name for p in parameters]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    call = called or step
    if "dataloader_idx" in names:
        return lambda batch, index: call(batch, index, dataloader_idx=dataloader_idx)
    if len(required) <= 2 and (len(positional) >= 2 or takes_any):
        return call
    if len(positional) == 1 and len(required) == 1:
        return lambda batch, index: call(batch)
    raise TaskError(
        f"{getattr(step, '__qualname__', step)} takes {names}. Expected (batch, batch_idx), (batch), or "
        "(batch, batch_idx, dataloader_idx)."
    )
