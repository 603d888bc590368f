"""One forward pass of a unit, as `Passes` records it, and tensors of zeros that stand for what a pass would give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.sharded import local_part
from .flat_states import is_composed


@dataclass(slots=True)
class Call:
    """One forward pass of a unit, with those inside of it."""

    unit: nn.Module
    takes_gradient: bool
    """Whether an input has a gradient, so that the unit's own are reduced as soon as it is reached."""
    is_quiet: bool = False
    """Whether it was made without gradients, inside of a pass that has them."""
    inner: list[Call] = field(default_factory=list)
    reached: list[bool] = field(default_factory=list)
    """Of each output that has a gradient, whether backward came to it."""

    def walk(self) -> Iterator[Call]:
        """This call and those inside of it, in the order in which they began."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def order(self) -> list[int]:
        """The units in the order in which they began, by `id`."""
        return [id(call.unit) for call in self.walk()]

    @property
    def is_passed_by(self) -> bool:
        """Whether backward came to none of its outputs. The outermost unit's are not watched."""
        return not any(self.reached)

    def watch(self, output: Tensor) -> None:
        """Note whether backward comes to an output."""
        self.reached.append(False)
        output.register_hook(partial(_note, self.reached, len(self.reached) - 1))  # type: ignore[no-untyped-call]


def _note(flags: list[bool], index: int, gradient: Tensor) -> None:
    """A hook of a tensor that sets a flag."""
    flags[index] = True


@contextmanager
def instead(unit: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a unit has another forward, with its hooks around it."""
    own = unit.__dict__.get("forward")
    unit.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del unit.__dict__["forward"]
        else:
            unit.__dict__["forward"] = own


def has_gradient(values: Any) -> bool:
    """Whether a tensor inside has a gradient."""
    if isinstance(values, Tensor):
        return values.requires_grad
    if isinstance(values, (tuple, list)):
        return any(map(has_gradient, values))
    if values is None or isinstance(values, (str, int, float)):
        return False
    return any(True for _ in with_gradients(values))  # a search takes longer than all that comes before it


def with_gradients(values: Any) -> Iterator[Tensor]:
    """The tensors inside that have a gradient."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)


def zero_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A scalar of 0 in which each tensor has a part, with gradients of 0, also where a value is not finite."""
    keep = torch.zeros((), dtype=torch.bool, device=device)
    zero = torch.zeros((), device=device)
    for tensor in map(local_part, tensors):  # of layers that are cut this process has its part alone
        if is_composed(tensor):
            zero = zero + _Zero.apply(tensor)  # type: ignore[no-untyped-call]
        else:
            zero = zero + torch.where(keep, tensor, 0).sum().float()
    return zero


class _Zero(torch.autograd.Function):
    """A scalar of 0 from a tensor of a kind that can't compute one itself, as weights gathered in FP8 are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.tensor = tensor
        return torch.zeros((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _zeros_like(ctx.tensor)


def _zeros_like(tensor: Tensor) -> Tensor:
    if is_composed(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.zeros_like(tensor)


class Zeros(torch.autograd.Function):
    """What it is given, whose backward gives parameters gradients of 0: those that are used, as is known by then."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, unused: Collection[int], *parameters: Tensor) -> Tensor:
        """Args: a tensor; the parameters to leave out, by `id`, a collection that may be filled later; parameters."""
        ctx.unused, ctx.parameters = unused, parameters
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the arguments."""
        own = [None if id(p) in ctx.unused or not p.requires_grad else _zeros_like(p) for p in ctx.parameters]
        return gradients[0], None, *own


def graph_of(loss: Tensor) -> tuple[set[Any], set[int]]:
    """The nodes to which a loss's backward comes, and the leaves, by `id`."""
    nodes: set[Any] = set()
    leaves: set[int] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        waiting += [following for following, _ in node.next_functions]
    return nodes, leaves
