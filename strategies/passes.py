"""The passes of a sharded model, in which every process has a part, also one that has nothing to compute.

Each unit's weights are gathered before its forward and its backward, and its gradients are reduced after that: so all
processes have to make the same passes in the same order. `Passes` records the order of the units; a process without a
batch or a loss goes through it with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.names import MethodForward
from ..checkpoint.sharded import local_part
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
        self.anchors_on: torch.device | None = None
        """Where the next call makes an anchor: a tensor by which backward comes to this unit without a loss."""

    def forward(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        """What the method gives, and the anchor."""
        on = self.anchors_on
        anchor = None if on is None else torch.zeros((), device=on, requires_grad=True)
        try:
            return getattr(self.module, name)(*args, **kwargs), anchor
        except Exception as error:  # noqa: BLE001  (raised again by the caller, once this unit has ended its forward)
            self.__dict__["raised"] = error
            return None, anchor


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
        """Whether backward came to none of its outputs."""
        return bool(self.reached) and not any(self.reached)

    def watch(self, output: Tensor) -> None:
        """Note whether backward comes to an output."""
        self.reached.append(False)
        output.register_hook(partial(_note, self.reached, len(self.reached) - 1))  # type: ignore[no-untyped-call]


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
        self._trained: dict[str, Call] = {}
        """The newest one that backward has followed."""
        self._open: Call | None = None
        """A forward pass with gradients that no backward has followed."""
        self._open_name = ""
        """Of its method."""
        self._anchor: Tensor | None = None
        """By which backward comes to the outermost unit, where the method gave no loss."""
        self._outputs: list[tuple[Call, int, Tensor]] = []
        """What its units gave: the call, which of its outputs that have a gradient, and this."""
        self._computed: dict[nn.Module, list[Tensor]] = {}
        """The parameters with which each unit computes. Gradients of 0 become NaN on the way to them where a value in
        between is not finite, so they are set to 0 once more."""
        self._watched: dict[int, Tensor] = {}
        """Those that tell when backward comes to them, by `id`."""
        self._used: set[int] = set()
        """To which of them it came since the newest forward pass began."""
        self._unused: set[int] = set()
        """To which of them the newest backward did not come: other processes reduce nothing for them."""
        self._is_training = False
        """Whether the newest forward pass began with gradients."""
        self._stack: list[Call] | None = None
        """The units that are in their forward now, outermost first; None: nothing is recorded."""
        self._reached = False
        """Whether the newest call came to a unit inside."""
        for unit in owned:
            unit.register_forward_pre_hook(self._enter, with_kwargs=True)
            unit.register_forward_hook(self._leave, always_call=True)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model as a forward pass. Collective."""
        entry = self._entry
        self._close()
        self._stack, self._is_training = [], torch.is_grad_enabled()
        self._used.clear()
        entry.__dict__["anchors_on"] = self._device if self._is_training else None
        try:
            outputs, self._anchor = entry(name, *args, **kwargs)
        finally:
            stack, self._stack = self._stack, None
        error, entry.__dict__["raised"] = entry.raised, None
        recorded = stack[0]
        if error is None and recorded.inner:
            self._known[name] = recorded
        if self._is_training:
            self._open, self._open_name = recorded, name
        if error is not None:
            raise error
        return outputs

    def evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model without backward. Where it does not come to the units here (it returns or raises
        before), their passes are made empty, since other processes may make them. Collective.
        """
        self._reached = False
        try:
            return self.call(name, *args, **kwargs)
        finally:
            known = self._known_call(name)
            if known is not None and not self._reached:
                for inner in known.inner:
                    self._run_empty(inner, torch.zeros((), device=self._device))

    def went_back(self) -> None:
        """Note that backward has followed the newest forward pass, and to what it came. Local."""
        if self._open is not None:
            self._trained[self._open_name] = self._open
            self._unused = self._watched.keys() - self._used
        self._close()

    def make_empty(self, name: str) -> None:
        """Make the passes that other processes make of a method, with nothing to compute and zeros as gradients.

        Without gradient mode that is the forward pass alone. Collective.

        Raises:
            DistributedError: this process does not know the order of the units.
        """
        known = self._known_call(name)
        opened = self._open
        if opened is not None and opened.inner:
            if known is None or opened.order() != known.order():
                raise DistributedError(
                    f"{name} ended in the middle of its forward pass, while other processes go on with theirs, which "
                    "needs this one. Leave a batch out before the model is called, or after it has given its outputs."
                )
            loss = self._zero_of_open(opened, self._trained.get(name))
        elif known is None and len(self._owned) > 1:
            raise DistributedError(
                f"this process has nothing to compute in the first {name}, and so does not know in which order the "
                "model's units take part. Give each process a batch with a loss to begin with."
            )
        else:
            like = (self._trained.get(name) if torch.is_grad_enabled() else None) or known or Call(self._entry, False)
            loss = self._run_empty(like, torch.zeros((), device=self._device))
        if torch.is_grad_enabled():
            used = {id(p): p for found in self._computed.values() for p in found if p.requires_grad}
            masks = [p.register_hook(torch.zeros_like) for p in used.values()]  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
            for mask in masks:
                mask.remove()
        self._close()

    def _known_call(self, name: str) -> Call | None:
        """A whole call of a method; of another one where it was not called yet."""
        return self._known.get(name) or next(iter(self._known.values()), None)

    def _close(self) -> None:
        self._open = self._anchor = None
        self._outputs.clear()

    def _enter(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if self._stack is None:
            return
        is_training = torch.is_grad_enabled()
        takes_gradient = is_training and (_has_gradient(args) or (bool(kwargs) and _has_gradient(kwargs)))
        call = Call(unit, takes_gradient, self._is_training and not is_training)
        if self._stack:
            self._reached = True
            self._stack[-1].inner.append(call)
        self._stack.append(call)
        if is_training:
            self._note_parameters(unit)

    def _leave(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        if self._stack is None:
            return
        if len(self._stack) > 1:  # the outermost stays, for who reads it
            call = self._stack.pop()
            if torch.is_grad_enabled():
                given = (outputs,) if isinstance(outputs, Tensor) else _with_gradients(outputs)
                for output in given:
                    if output.requires_grad:
                        self._outputs.append((call, len(call.reached), output))
                        call.watch(output)

    def _note_parameters(self, unit: nn.Module) -> None:
        """Keep a unit's parameters as they are in its forward. torch has the same ones in each, so one is looked at."""
        owned, known = self._owned[unit], self._computed.get(unit)
        if owned and (known is None or known[0] is not owned[0][0]._parameters[owned[0][1]]):
            self._computed[unit] = self._parameters_of(unit)
            for parameter in self._computed[unit]:
                if parameter.requires_grad and id(parameter) not in self._watched:
                    self._watched[id(parameter)] = parameter
                    parameter.register_hook(partial(_note_in, self._used, id(parameter)))  # type: ignore[no-untyped-call]

    def _parameters_of(self, unit: nn.Module) -> list[Tensor]:
        return [getattr(part, name) for part, name in self._owned[unit]]

    def _used_of(self, unit: nn.Module) -> list[Tensor]:
        """The parameters of a unit that losses train, as they are now: whole ones in its forward."""
        return [p for p in self._parameters_of(unit) if p.requires_grad and id(p) not in self._unused]

    def _zero_of_open(self, opened: Call, like: Call | None) -> Tensor:
        """A loss of 0 from what the open forward pass gave, as far as backward came to it in one like this."""
        others: dict[int, Call] = {}
        if like is not None and like.order() == opened.order():
            others = {id(call): other for call, other in zip(opened.walk(), like.walk(), strict=True)}
        outputs = [
            output
            for call, index, output in self._outputs
            if id(call) not in others or all(others[id(call)].reached[index : index + 1])
        ]
        assert self._anchor is not None
        return _zero_of([*outputs, *self._used_of(self._entry), self._anchor], self._device)  # backward begins with it

    def _run_empty(self, call: Call, carried: Tensor) -> Tensor:
        """A unit's forward in which its parameters have a part of 0, after those of the units inside of it. Backward
        comes to it if it does elsewhere.
        """
        inside: list[Tensor] = []

        def forward(given: Tensor, *_: Any) -> Tensor:
            for inner in call.inner:
                given = self._run_empty(inner, given)
            inside.append(given)
            if call.is_passed_by:
                return given.detach()
            total: Tensor = given + _zero_of(self._used_of(call.unit), self._device)
            return total

        with _instead(call.unit, forward):
            if call.is_quiet:
                with torch.no_grad():
                    call.unit(carried.detach())
                return carried
            if call.takes_gradient and not call.is_passed_by:
                # Where nothing carries one, the input's gradient comes from what is no unit.
                outputs: Tensor = call.unit(carried if carried.requires_grad else carried.clone().requires_grad_())
                return outputs
            outputs = call.unit(carried.detach())
        return carried + (inside[0] if call.is_passed_by else outputs)


def _note(flags: list[bool], index: int, gradient: Tensor) -> None:
    """A hook of a tensor that sets a flag."""
    flags[index] = True


def _note_in(found: set[int], key: int, gradient: Tensor) -> None:
    """A hook of a tensor that puts a key into a set."""
    found.add(key)


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


def _has_gradient(values: Any) -> bool:
    """Whether a tensor inside has a gradient."""
    if isinstance(values, Tensor):
        return values.requires_grad
    if isinstance(values, (tuple, list)):
        return any(map(_has_gradient, values))
    if values is None or isinstance(values, (str, int, float)):
        return False
    return any(True for _ in _with_gradients(values))  # a search takes longer than all that comes before it


def _with_gradients(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _zero_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    keep = torch.zeros((), dtype=torch.bool, device=device)
    zero = torch.zeros((), device=device)
    for tensor in map(local_part, tensors):  # of layers that are cut this process has its part alone
        zero = zero + torch.where(keep, tensor, 0).sum().float()
    return zero
