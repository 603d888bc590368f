"""The passes of a sharded model, in which every process has a part, also one that has nothing to compute.

Each unit's weights are gathered before its forward and its backward, and its gradients are reduced after that: so all
processes have to make the same passes in the same order. `Passes` records the order of the units; a process without a
batch or a loss goes through it with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.names import MethodForward
from ..distributed.errors import DistributedError
from ..distributed.flow import Flow
from .compiling import is_compiled_around
from .guard import Guard
from .sharded_calls import Call, Zeros, graph_of, has_gradient, instead, with_gradients, zero_of
from .sharded_rounds import LOSS, NOTHING, Kind, Rounds, Said

Owned = Mapping[nn.Module, Sequence[tuple[nn.Module, str]]]


class Learned(NamedTuple):
    """What `Passes` knows of the order of its units."""

    known: dict[str, Call]
    trained: dict[str, Call]
    names: set[str]
    unused: set[int]


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
        self._newest = Call(entry, False)
        """The newest call, however it ended."""
        self._learned: set[str] = set()
        """Methods whose passes all processes know."""
        # Told of from inside of what is compiled, a first pass would be compiled in pieces, and once more without them.
        self._tells = not is_compiled_around(entry, owned)
        self._rounds = Rounds()
        self._units = [*owned]
        self._numbers = {unit: number for number, unit in enumerate(owned)}
        self._followed: list[tuple[Call, Tensor]] = []
        """What units gave whose passes were made as other processes told of them."""
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
        tells = () if self._is_known(name) else self._tell_units()
        try:
            outputs, self._anchor = entry(name, *args, **kwargs)
        finally:
            stack, self._stack = self._stack, None
            for hook in tells:
                hook.remove()
        error, entry.__dict__["raised"] = entry.raised, None
        recorded = self._newest = stack[0]
        if error is None and recorded.inner:
            self._known[name] = recorded
        if self._is_training:
            self._open, self._open_name = recorded, name
        if error is not None:
            raise error
        return outputs

    def forget(self, name: str) -> None:
        """Have the next pass of a method told of, as the first one is: a process makes it that has no batch, which may
        be another way through the model than its newest. Local, on all processes.
        """
        self._learned.discard(name)

    def guard_rounds(self, guard: Guard) -> None:
        """Have rounds of the first passes begin with a meeting, where they are guarded. Local, on all processes."""
        self._rounds.meet = guard.meet

    def learned(self) -> Learned:
        """What is known now, which all processes know. Local."""
        return Learned(dict(self._known), dict(self._trained), set(self._learned), set(self._unused))

    def leave(self, learned: Learned) -> None:
        """Leave passes in their middle, and know what was known before them. Local, on all processes."""
        self._known, self._trained, self._learned, self._unused = learned
        self._entry.__dict__["raised"] = None
        self._close()

    def evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model without backward. Where it does not come to the units here (it returns or raises
        before), their passes are made empty, since other processes may make them. Collective.
        """
        self._reached = False
        try:
            outputs = self.call(name, *args, **kwargs)
        except BaseException as error:
            if not self._reached:
                self._make_inner_empty(name)
            elif isinstance(error, Flow):  # it goes on; where a failure ends this process, the others hear of it
                self._end_evaluation(name)
            raise
        if not self._reached:
            self._make_inner_empty(name)
        elif not self._is_known(name):
            self._end_evaluation(name)
        return outputs

    def went_back(self) -> None:
        """Note that backward has followed the newest forward pass, and to what it came. Local."""
        if self._open is not None:
            self._trained[self._open_name] = self._open
            self._unused = self._watched.keys() - self._used
        self._close()

    def before_backward(self, loss: Tensor) -> None:
        """Tell processes that have none of what backward comes to, unless they know. Collective in the first passes."""
        name = self._open_name
        if self._open is not None and not self._is_known(name):
            self._learned.add(name)
            self._rounds.hear(LOSS)
            self._rounds.share(self._reach_of(self._open, loss))

    def make_empty(self, name: str) -> None:
        """Make the passes that other processes make of a method, with nothing to compute and zeros as gradients.

        Without gradient mode that is the forward pass alone. Collective.

        Raises:
            DistributedError: this process can't make them: it has left its own in the middle.
        """
        is_training = torch.is_grad_enabled()
        known, opened = self._known_call(name), self._open
        if not self._is_known(name):
            loss = self._follow(name)
        elif opened is not None and opened.inner:
            assert known is not None
            if opened.order() != known.order():
                raise _left_in_the_middle(name)
            loss = self._zero_of_open(opened, self._trained.get(name))
        else:
            like = (self._trained.get(name) if is_training else None) or known or Call(self._entry, False)
            loss = self._run_empty(like, torch.zeros((), device=self._device))
        if is_training and loss is not None:
            used = {id(p): p for found in self._computed.values() for p in found if p.requires_grad}
            masks = [p.register_hook(_masked) for p in used.values()]  # type: ignore[no-untyped-call]
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                for mask in masks:
                    mask.remove()
        self._close()

    def _is_known(self, name: str) -> bool:
        """Whether all processes know the passes of a method, or have to do without."""
        return name in self._learned or not self._tells

    def _known_call(self, name: str) -> Call | None:
        """A whole call of a method; of another one where it was not called yet."""
        return self._known.get(name) or next(iter(self._known.values()), None)

    def _make_inner_empty(self, name: str) -> None:
        """What an evaluation has to do whose method came to no unit inside."""
        if self._is_known(name):
            known = self._known_call(name)
            for inner in () if known is None else known.inner:
                self._run_empty(inner, torch.zeros((), device=self._device))
            return
        call = Call(self._entry, False)
        if self._follow_units(call) is not NOTHING:
            raise _left_in_the_middle(name)
        self._learn_evaluated(name, call)

    def _end_evaluation(self, name: str) -> None:
        """Make sure that other processes have come to the end of an evaluation's pass as well."""
        if self._is_known(name):
            known = self._known.get(name)
            has_ended = known is None or self._newest.order() == known.order()
        else:
            has_ended = self._rounds.hear(NOTHING) is NOTHING
            self._learn_evaluated(name, self._newest)
        if not has_ended:
            raise _left_in_the_middle(name)

    def _learn_evaluated(self, name: str, call: Call) -> None:
        if call.inner or len(self._owned) == 1:
            self._known[name] = call
            self._learned.add(name)

    def _close(self) -> None:
        self._open = self._anchor = None
        self._outputs.clear()
        self._followed.clear()

    def _enter(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if self._stack is None:
            return
        is_training = torch.is_grad_enabled()
        takes_gradient = is_training and (has_gradient(args) or (bool(kwargs) and has_gradient(kwargs)))
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
                given = (outputs,) if isinstance(outputs, Tensor) else with_gradients(outputs)
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
        reached = None
        if like is not None and like.order() == opened.order():
            reached = [call.reached for call in like.walk()]
        return self._zero_where(opened, reached)

    def _zero_where(self, opened: Call, reached: Sequence[Sequence[bool]] | None) -> Tensor:
        """The same where it is known of each unit to which of its outputs backward comes; None: to all."""
        flags = {} if reached is None else {id(call): each for call, each in zip(opened.walk(), reached, strict=True)}
        outputs = [
            output
            for call, index, output in self._outputs
            if id(call) not in flags or all(flags[id(call)][index : index + 1])
        ]
        assert self._anchor is not None
        return zero_of([*outputs, *self._used_of(self._entry), self._anchor], self._device)  # backward begins with it

    # The first passes.

    def _tell_units(self) -> list[Any]:
        """Hooks that tell the other processes of each unit before it is entered, and when it is left."""
        hooks = [
            unit.register_forward_pre_hook(self._tell_enter, prepend=True, with_kwargs=True) for unit in self._owned
        ]
        return [*hooks, *(unit.register_forward_hook(self._tell_leave) for unit in self._owned)]

    def _tell_enter(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        is_training = torch.is_grad_enabled()
        takes_gradient = is_training and has_gradient((*args, *kwargs.values()))
        is_quiet = self._is_training and not is_training
        self._rounds.hear(Said(Kind.ENTER, self._numbers[unit], takes_gradient, is_quiet))

    def _tell_leave(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        if unit is not self._entry:
            self._rounds.hear(Said(Kind.LEAVE, self._numbers[unit]))

    def _reach_of(self, opened: Call, loss: Tensor) -> list[Any]:
        """To what backward of a loss comes: of each unit's outputs, and the parameters to which it does not."""
        nodes, leaves = graph_of(loss)
        reached: dict[int, list[bool]] = {}
        for call, _, output in self._outputs:
            reached.setdefault(id(call), []).append(output.grad_fn in nodes)
        places = [
            (self._numbers[unit], index, p) for unit, own in self._computed.items() for index, p in enumerate(own)
        ]
        unused = [(number, index) for number, index, p in places if p.requires_grad and id(p) not in leaves]
        return [[reached.get(id(call), []) for call in opened.walk()], unused]

    def _follow(self, name: str) -> Tensor | None:
        """Make the forward pass that other processes tell of. Gives a loss of 0 for backward, if they have one."""
        opened = self._open
        if opened is not None and opened.inner:
            call, end = opened, self._rounds.hear(NOTHING)
        else:
            if opened is None and self._rounds.hear(NOTHING) is NOTHING:  # else they enter the outermost unit
                return None
            call = Call(self._entry, False)
            end = self._follow_unit(call)
        if not torch.is_grad_enabled():
            self._learn_evaluated(name, call)
        if end.kind not in (Kind.NOTHING, Kind.LOSS):
            raise _left_in_the_middle(name)
        return None if end is NOTHING else self._learn_loss(name, call)

    def _follow_unit(self, call: Call) -> Said:
        """The forward pass of a unit that other processes have entered. Gives what they say after it."""
        ends = [NOTHING]

        def forward(given: Tensor, *_: Any) -> Tensor:
            ends[0] = self._follow_units(call)
            if not torch.is_grad_enabled():
                return given
            if call.unit is self._entry:
                given = given + torch.zeros((), device=self._device, requires_grad=True)  # an anchor, as it has
            self._note_parameters(call.unit)
            zeros = (given, self._unused, *self._computed.get(call.unit, ()))
            outputs: Tensor = Zeros.apply(*zeros)  # type: ignore[no-untyped-call]
            return outputs

        given = torch.zeros((), device=self._device, requires_grad=call.takes_gradient)
        with instead(call.unit, forward), torch.set_grad_enabled(torch.is_grad_enabled() and not call.is_quiet):
            self._followed.append((call, call.unit(given)))
        return ends[0]

    def _follow_units(self, call: Call) -> Said:
        """The units inside of one. Gives what other processes say after them."""
        while (said := self._rounds.hear(NOTHING)).kind == Kind.ENTER:
            inner = Call(self._units[said.unit], said.takes_gradient, said.is_quiet)
            call.inner.append(inner)
            if self._follow_unit(inner).kind != Kind.LEAVE:
                raise _left_in_the_middle(type(inner.unit).__name__)
        return said

    def _learn_loss(self, name: str, call: Call) -> Tensor:
        """A loss of 0 whose backward comes to what that of other processes comes to."""
        reached, unused = self._rounds.share(None)
        self._unused.clear()
        self._unused.update(id(self._computed[self._units[number]][index]) for number, index in unused)
        self._learned.add(name)
        self._known[name] = self._trained[name] = call
        if call is self._open:
            return self._zero_where(call, reached)
        for each, flags in zip(call.walk(), reached, strict=True):
            each.reached = flags
        outputs = [output for each, output in self._followed if each is call or not each.is_passed_by]
        return zero_of((output for output in outputs if output.requires_grad), self._device)

    def _run_empty(self, call: Call, carried: Tensor) -> Tensor:
        """A unit's forward in which its parameters have a part of 0, after those of the units inside of it. Backward
        comes to it if it does elsewhere.
        """
        inside: list[Tensor] = []
        is_passed_by = call.is_passed_by and call.unit is not self._entry

        def forward(given: Tensor, *_: Any) -> Tensor:
            for inner in call.inner:
                given = self._run_empty(inner, given)
            inside.append(given)
            if is_passed_by:
                return given.detach()
            total: Tensor = given + zero_of(self._used_of(call.unit), self._device)
            return total

        with instead(call.unit, forward):
            if call.is_quiet:
                with torch.no_grad():
                    call.unit(carried.detach())
                return carried
            if call.takes_gradient and not is_passed_by:
                # Where nothing carries one, the input's gradient comes from what is no unit.
                outputs: Tensor = call.unit(carried if carried.requires_grad else carried.clone().requires_grad_())
                return outputs
            outputs = call.unit(carried.detach())
        return carried + (inside[0] if is_passed_by else outputs)


def _note_in(found: set[int], key: int, gradient: Tensor | None) -> None:
    """A hook of a tensor that puts a key into a set, where a gradient comes to it."""
    if gradient is not None:
        found.add(key)


def _masked(gradient: Tensor | None) -> Tensor | None:
    """A hook of a tensor that makes its gradient 0."""
    return None if gradient is None else torch.zeros_like(gradient)


def _left_in_the_middle(name: str) -> DistributedError:
    return DistributedError(
        f"{name} ended in the middle of its forward pass, while other processes go on with theirs, which needs this "
        "one. Leave a batch out before the model is called, or after it has given its outputs."
    )
