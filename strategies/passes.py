"""The passes of a sharded model, in which every process has a part, also one that has nothing to compute.

Each unit's weights are gathered before its forward and its backward, and its gradients are reduced after that: so all
processes have to make the same passes in the same order. `Passes` records the order of the units; a process without a
batch or a loss goes through it with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.names import MethodForward
from ..distributed.errors import DistributedError

Owned = Mapping[nn.Module, Sequence[tuple[nn.Module, str]]]


class Entry(MethodForward):
    """The outermost unit of a sharded model, of which any method can be called as a forward pass.

    Args:
        module: the model.
        method: the one that training calls.
    """

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__(module, method)
        self.raised: Exception | None = None
        """What the newest call has raised."""

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self.module, name)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (raised again by the caller, once this unit has ended its forward)
            self.__dict__["raised"] = error
            return None


@dataclass(slots=True)
class Call:
    """One forward pass of a unit, with those inside of it."""

    unit: nn.Module
    takes_gradient: bool
    """Whether an input has a gradient, so that the unit's own are reduced as soon as it is reached."""
    inner: list[Call] = field(default_factory=list)

    def order(self) -> list[int]:
        """The units in the order in which they began, by `id`."""
        return [id(self.unit), *(each for call in self.inner for each in call.order())]


class Passes:
    """Makes the passes of one model, real ones and empty ones.

    Args:
        entry: the outermost unit.
        owned: of each unit, it among them, the parameters that are no other unit's: their modules and names.
        device: where it computes.
    """

    def __init__(self, entry: Entry, owned: Owned, device: torch.device) -> None:
        self._entry = entry
        self._owned = owned
        self._device = device
        self._known: dict[str, Call] = {}
        """The newest whole call of each method."""
        self._open: Call | None = None
        """A forward pass with gradients that no backward has followed."""
        self._outputs: list[Tensor] = []
        """What its units gave."""
        self._unsharded: dict[int, Tensor] = {}
        """The parameters that they computed with, by `id`. Gradients of 0 become NaN on the way to them where a value
        in between is not finite, so they are set to 0 once more."""
        self._stack: list[Call] | None = None
        """The units that are in their forward now, outermost first; None: nothing is recorded."""
        for unit in owned:
            unit.register_forward_pre_hook(self._enter, with_kwargs=True)
            unit.register_forward_hook(self._leave, always_call=True)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model as a forward pass. Collective."""
        entry = self._entry
        self._close()
        self._stack = []
        try:
            outputs = entry(name, *args, **kwargs)
        finally:
            stack, self._stack = self._stack, None
        error, entry.__dict__["raised"] = entry.raised, None
        recorded = stack[0]
        if error is None and recorded.inner:
            self._known[name] = recorded
        if torch.is_grad_enabled():
            self._open = recorded
        if error is not None:
            raise error
        return outputs

    def went_back(self) -> None:
        """Note that backward has followed the newest forward pass. Local."""
        self._close()

    def make_empty(self, name: str) -> None:
        """Make the passes that other processes make of a method, with nothing to compute and zeros as gradients.

        Without gradient mode that is the forward pass alone. Collective.

        Raises:
            DistributedError: this process does not know the order of the units.
        """
        known = self._known.get(name) or next(iter(self._known.values()), None)
        opened = self._open
        if opened is not None and opened.inner:
            if known is None or opened.order() != known.order():
                raise DistributedError(
                    f"{name} ended in the middle of its forward pass, while other processes go on with theirs, which "
                    "needs this one. Leave a batch out before the model is called, or after it has given its outputs."
                )
            loss = self._zero_of_open()
        elif known is None and len(self._owned) > 1:
            raise DistributedError(
                f"this process has nothing to compute in the first {name}, and so does not know in which order the "
                "model's units take part. Give each process a batch with a loss to begin with."
            )
        else:
            loss = self._run_empty(known or Call(self._entry, False), torch.zeros((), device=self._device))
        if torch.is_grad_enabled():
            masks = [p.register_hook(torch.zeros_like) for p in self._unsharded.values()]  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
            for mask in masks:
                mask.remove()
        self._close()

    def _close(self) -> None:
        self._open = None
        self._outputs.clear()
        self._unsharded.clear()

    def _enter(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if self._stack is None:
            return
        is_training = torch.is_grad_enabled()
        call = Call(unit, is_training and any(True for _ in _with_gradients((args, kwargs))))
        if self._stack:
            self._stack[-1].inner.append(call)
        self._stack.append(call)
        if is_training:
            self._unsharded.update((id(p), p) for p in self._trained(unit))

    def _leave(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        if self._stack is None:
            return
        if len(self._stack) > 1:  # the outermost stays, for who reads it
            self._stack.pop()
            if torch.is_grad_enabled():
                self._outputs += _with_gradients(outputs)

    def _trained(self, unit: nn.Module) -> list[Tensor]:
        """The trained parameters of a unit as they are now: whole ones in its forward."""
        found = [getattr(part, name) for part, name in self._owned[unit]]
        return [parameter for parameter in found if parameter.requires_grad]

    def _zero_of_open(self) -> Tensor:
        """A loss of 0 from what the open forward pass gave."""
        return _zero_of([*self._outputs, *self._trained(self._entry)], self._device)

    def _run_empty(self, call: Call, carried: Tensor) -> Tensor:
        """A unit's forward in which its parameters have a part of 0, after those of the units inside of it."""

        def forward(given: Any, *_: Any) -> Tensor:
            if call.unit is self._entry:
                given = torch.zeros_like(given, requires_grad=True)  # for units whose inputs have a gradient
            for inner in call.inner:
                given = self._run_empty(inner, given)
            total: Tensor = given + _zero_of(self._trained(call.unit), self._device)
            return total

        with _instead(call.unit, forward):
            if call.takes_gradient:
                outputs: Tensor = call.unit(carried)
            else:
                outputs = carried + call.unit(carried.detach())
        return outputs


@contextmanager
def _instead(unit: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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


def _with_gradients(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _zero_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    keep = torch.zeros((), dtype=torch.bool, device=device)
    zero = torch.zeros((), device=device)
    for tensor in tensors:
        zero = zero + torch.where(keep, tensor, 0).sum().float()
    return zero
