"""`Averages`: running averages of a module's weights, and a context in which the module has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoint.finite import all_finite, nonfinite_names
from ..checkpoint.names import plain_names
from ..checkpoint.sharded import fill_part, is_sharded, local_part, whole
from ..checkpoint.shards import listed
from ..checkpoint.stored import StoredTensor
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.exchange import exchange


class Place(NamedTuple):
    """Where a module keeps a parameter or a buffer, whatever tensor that is now."""

    owner: dict[str, Tensor | None]
    attribute: str
    is_buffer: bool

    @property
    def value(self) -> Tensor | None:
        """What is there now."""
        return self.owner.get(self.attribute)


def places_of(module: nn.Module) -> dict[str, Place]:
    """The places of all parameters and persistent buffers, by their plain names; what is shared has its first name."""
    found: dict[str, Place] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        kinds: list[tuple[dict[str, Tensor | None], bool]] = [(part._parameters, False), (part._buffers, True)]
        for owner, is_buffer in kinds:
            for attribute, value in owner.items():
                if value is None or id(value) in seen or (is_buffer and attribute in part._non_persistent_buffers_set):
                    continue
                seen.add(id(value))
                found[f"{path}.{attribute}" if path else attribute] = Place(owner, attribute, is_buffer)
    plain = plain_names(module, found)
    return {plain[name]: place for name, place in found.items()}


class Averages:
    """Running averages of a module's trained parameters, and of its buffers where asked for.

    They are on the devices of what they average and have its number format; averages of half precision are kept in
    float32, whose steps of a thousandth would be lost there. Of a weight that is spread over processes each has that
    part of the average which it has of the weight. Weights that are tied have one average. Of the buffers those are
    averaged that are saved with the module, hold fractions, and are finite when the averages begin, in each process
    that has them; the others (counters, masks, caches) stay the module's own. Each process averages its own buffers;
    where they differ, process 0 has those that are evaluated and saved, as it is with the buffers themselves. Making
    them is collective where buffers are in some of the processes alone.

    Args:
        module: whose weights they are.
        owner: the callback's name, for errors.
        use_buffers: whether buffers are averaged as well.
        part: gives what this process has of a parameter's values, to read and to write.
        show: lets the module compute with what was written there, and gives what goes back.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: str,
        *,
        use_buffers: bool,
        part: Callable[[Tensor], Tensor],
        show: Callable[[], Callable[[], None]],
    ) -> None:
        self._module = module
        self._owner = owner
        self._use_buffers = use_buffers
        self._part, self._show = part, show
        self._places = places_of(module)
        self._known: set[Tensor] = set()
        """Parameters that are averaged."""
        self.tensors: dict[str, Tensor] = {}
        """The averages by the plain names of what they average."""
        self._values: list[tuple[Place, Tensor, Tensor]] = []
        """What `update` averages, in the order of the averages; empty until it has looked. See `_fitting`."""
        if use_buffers:
            self._add_buffers()

    def track(self, parameters: Iterable[Tensor]) -> None:
        """Also average those of these parameters that are trained by now; each begins with the value that it has."""
        new = {p for p in parameters if p.requires_grad and p not in self._known}
        if not new:
            return
        self._known |= new
        self._places, self._values = places_of(self._module), []
        for name, place in self._places.items():
            if place.value in new and name not in self.tensors:
                self._add(name)

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move each average to the value as it is now, by this share of the way. Nothing is read from the device.

        Raises:
            ConfigError: a weight has got another shape.
        """
        # Modules may put another tensor into a place, as they do with buffers.
        if not self._values or any(owner.get(name) is not value for (owner, name, _), value, _ in self._values):
            self._values = self._fitting(self._places)
        alike: tuple[list[Tensor], list[Tensor]] = ([], [])
        for kept, (_, _, tensor) in zip(self.tensors.values(), self._values, strict=True):
            average, value = local_part(kept), local_part(tensor)
            if value.dtype == average.dtype:
                alike[0].append(average)
                alike[1].append(value)
            else:  # one by one: converted all at once they would take their memory again
                average.lerp_(value.to(average.dtype), weight)
        if alike[0]:
            torch._foreach_lerp_(*alike, weight)

    @contextmanager
    def applied_to(self, module: nn.Module, *, stay: bool = False) -> Iterator[None]:
        """A context in which a module has the averages. Its beginning is collective where `show` is.

        Args:
            module: the averaged one, or another of the same make.
            stay: leave them there at the end; an exception still brings the module's own values back.
        Raises:
            ConfigError: the module does not have these weights.
        """
        found = self._fitting(places_of(module))
        own = [(place, value, part, local_part(part.detach()).clone()) for place, value, part in found]
        shown = [_nothing]

        def put_back() -> None:
            _write([part for _, _, part, _ in own], [copy for *_, copy in own])
            shown[0]()
            for place, value, *_ in own:  # a module may have put another buffer into its place
                place.owner[place.attribute] = value

        try:
            _write([part for _, _, part in found], list(self.tensors.values()))
            if any(part is not value for _, value, part in found):
                shown[0] = self._show()
            yield
        except BaseException:
            put_back()
            raise
        if not stay:
            put_back()

    def load(self, saved: Mapping[str, Tensor | StoredTensor], *, buffers: bool) -> None:
        """Take over averages that were saved.

        Args:
            saved: by the names of what they average.
            buffers: whether buffers were averaged; those that are not among the saved ones are not averaged then.
        Raises:
            CheckpointError: they are of other weights; lists those.
        """
        unknown = [name for name in saved if name not in self._places]
        if unknown:
            raise CheckpointError(
                f"the checkpoint has averages of {self._owner} for weights that {type(self._module).__name__} lacks: "
                f"{listed(unknown)}. Resume with the task that was saved, or leave "
                f"{self._owner} out."
            )
        if buffers:  # what was not finite when they began may be by now
            for name in [name for name in self.tensors if name not in saved and self._places[name].is_buffer]:
                del self.tensors[name]
        for name, tensor in saved.items():
            place = self._places[name]
            if place.is_buffer and not self._use_buffers:
                continue
            average = self._add(name)
            if average.shape != tensor.shape:
                raise CheckpointError(
                    f"the checkpoint has an average of {self._owner} for {name!r} of shape {tuple(tensor.shape)}, and "
                    f"{type(self._module).__name__} has {tuple(average.shape)}. Resume with the task that was saved."
                )
            _fill(average, tensor)
            if not place.is_buffer and place.value is not None:
                self._known.add(place.value)

    def _fitting(self, places: Mapping[str, Place]) -> list[tuple[Place, Tensor, Tensor]]:
        """What there is now in the place of each average, and what this process has of its values, in their order.

        Raises:
            ConfigError: it is gone, or has another shape.
        """
        found = []
        for name, average in self.tensors.items():
            place = places.get(name)
            value = None if place is None else place.value
            part = None if value is None else self._part(value)
            if place is None or value is None or part is None or part.shape != average.shape:
                state = "is gone" if part is None else f"has the shape {tuple(part.shape)}"
                raise ConfigError(
                    f"{self._owner} averages {name!r} of shape {tuple(average.shape)}, which {state} now. Weights keep "
                    "their names and shapes while they are averaged: change them before fit."
                )
            found.append((place, value, part))
        return found

    def _add_buffers(self) -> None:
        buffers = {name: place.value for name, place in self._places.items() if place.is_buffer}
        fractions = {name: self._part(b) for name, b in buffers.items() if b is not None and b.is_floating_point()}
        found = [] if all_finite(fractions.values()) else nonfinite_names(fractions)
        is_spread = any(is_sharded(part) for part in fractions.values())
        bad = {*chain(*exchange(found, "averages of buffers"))} if is_spread else {*found}
        for name in fractions:
            if name not in bad:  # the average of an infinity with itself is NaN
                self._add(name)

    def _add(self, name: str) -> Tensor:
        value = self._places[name].value
        assert value is not None
        if is_lazy(value):
            raise ConfigError(
                f"{self._owner} can't average {name!r}, which has no shape yet, as its layer is lazy. Call the model "
                "once before fit."
            )
        part = self._part(value).detach()
        is_half = part.is_floating_point() and part.dtype.itemsize < 4
        dtype = torch.float32 if is_half else part.dtype
        average = self.tensors[name] = part.to(dtype, copy=True)
        self._values = []
        return average


@torch.no_grad()
def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, past autograd: a graph that still holds them is to find what it knew, once it is
    brought back. Collective where a value is in parts and its target is whole.
    """
    if targets:
        own = [local_part(target.detach()).data for target in targets]
        fitting = [
            local_part(value) if is_sharded(target) else whole(value)
            for target, value in zip(targets, values, strict=True)
        ]
        torch._foreach_copy_(own, fitting)


def _fill(average: Tensor, saved: Tensor | StoredTensor) -> None:
    """Copy what was saved into an average; of a whole tensor this process's part."""
    if isinstance(saved, StoredTensor):
        saved.read_into(average)
    elif is_sharded(average) and not is_sharded(saved):
        fill_part(average, saved)
    else:
        local_part(average).copy_(local_part(saved))


def _nothing() -> None:
    pass
