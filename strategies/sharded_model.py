"""What a strategy keeps of a model that it has sharded, and how the loops call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..distributed import watch
from ..distributed.exchange import exchange
from .guard import Guard
from .passes import Passes


@dataclass(slots=True)
class Sharded:
    """One model that was sharded."""

    model: nn.Module
    """As it was given."""
    entry: Any
    """Its outermost unit, an `FSDPModule`."""
    passes: Passes | None
    """Makes its passes, where training calls one method of it."""
    whole: list[nn.Parameter]
    """Parameters that are not spread."""
    syncs: bool = True
    """Whether the next backward reduces gradients."""
    guard: Guard | None = None
    """At which its collectives meet in guarded passes; None: there was none yet."""


class Called:
    """A method of a sharded model, as a loop calls it.

    Args:
        passes: of the model.
        name: of the method.
        evaluated: the outermost unit, where the method is called in an evaluation: in turns with the other processes.
    """

    def __init__(self, passes: Passes, name: str, evaluated: Any = None) -> None:
        self._passes = passes
        self._name = name
        self._evaluated = evaluated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._evaluated is None:
            with watch.collective(self._name):
                return self._passes.call(self._name, *args, **kwargs)
        if not all(exchange(True, "evaluation")):
            self._passes.forget(self._name)
        try:
            with watch.collective(self._name):
                return self._passes.evaluate(self._name, *args, **kwargs)
        finally:
            free(self._evaluated)


@contextmanager
def syncing(found: Sharded, value: bool) -> Iterator[None]:
    """A context in which backward reduces the model's gradients, or not. Local."""
    before, found.syncs = found.syncs, value
    found.entry.set_requires_gradient_sync(value)
    try:
        yield
    finally:
        found.syncs = before
        found.entry.set_requires_gradient_sync(before)


def free(entry: Any) -> None:
    """Free the weights of all units that a forward pass without backward has left whole. Local."""
    from torch.distributed.fsdp import FSDPModule

    for module in entry.modules():
        if isinstance(module, FSDPModule):  # each frees its own alone
            module.reshard()


def learn_formats(groups: Sequence[Any], *_: Any) -> None:
    """Let units which began frozen know in which formats gradients are reduced, once they are trained: torch looks at
    that in the first pass alone. Serves as a hook. Local.
    """
    for group in groups:
        if group._orig_dtype is None and any(each.sharded_param.requires_grad for each in group.fsdp_params):
            group._init_mp_dtypes()


def reduce_in_one_format(group: Any, reduce: Callable[..., Any], *args: Any) -> Any:
    """What torch calls after a unit's backward. In a window's last batch gradients that were accumulated have another
    format than those that come only now, of what was unfrozen or not used before; torch reduces one format alone.
    """
    new = [each for each in group.fsdp_params if each.unsharded_accumulated_grad is None]
    if group.reduce_grads and 0 < len(new) < len(group.fsdp_params):
        for each in new:
            _accumulate(each, fills=group.reduce_scatter_unused_params)
    return reduce(*args)


def _accumulate(kept: Any, *, fills: bool) -> None:
    """Bring a new gradient into the format of accumulated ones; in the place of none there are zeros if `fills`."""
    parameter = getattr(kept, "_unsharded_param", None)
    if parameter is None:
        return
    if fills and parameter.grad is None and parameter.requires_grad:
        parameter.grad = torch.zeros_like(parameter)
    kept.to_accumulated_grad_if_needed()


def free_after_evaluation(entry: Any, args: Any, outputs: Any) -> None:
    """A hook that frees the weights of all units after a forward pass without gradients. Local."""
    if not torch.is_grad_enabled():
        free(entry)
