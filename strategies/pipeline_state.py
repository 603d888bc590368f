"""States of a model whose layers are in several processes, and of its optimizer: in parts, whole on the main one, and
back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.flat import FlatPart
from ..checkpoint.sharded import is_sharded, whole
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.exchange import exchange
from ..distributed.sending import as_bytes
from .optimizer import parameters_of
from .pipeline_groups import PipelineGroups
from .pipeline_layers import Cut
from .sharded_state import load_model_state as load_sharded
from .sharded_state import load_optimizer_state as load_sharded_optimizer


def model_state(cut: Cut, groups: PipelineGroups) -> dict[str, Any]:
    """A model's state dict, of which each process has its part, in the same memory: that of its layers. Local.

    Tied parameters stay one.
    """
    return _state(cut, lambda value, owner: part_of(value, groups, is_here=owner == groups.place))


def whole_model_state(cut: Cut, groups: PipelineGroups) -> dict[str, Any]:
    """A model's state dict with the values of all stages, on the host of the main process alone. Collective.

    One tensor at a time is put together and sent there. Tied parameters stay one.
    """
    state = _state(cut, lambda value, owner: _bring(value, owner, groups))
    return state if dist.get_rank() == 0 else {}


def _state(cut: Cut, find: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """A model's state dict with what a function makes of the tensors of layers, each once, and of who has them."""
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in cut.model.state_dict(keep_vars=True).items():
        owner = cut.owner_of(name)
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = value.detach() if owner is None else find(value.detach(), owner)
            value = known[id(value)]
        state[name] = value
    return state


def load_model_state(cut: Cut, place: int, state: Mapping[str, Any], strict: bool) -> None:
    """Put the parts of a whole state, which every process has, into the layers of this one. Local.

    Args:
        cut: of the model.
        place: of this process in its pipeline.
        state: of all stages.
        strict: as torch takes it.
    """
    own = cut.model.state_dict(keep_vars=True)

    def wanted(name: str, value: Any) -> Any:
        is_here = name not in own or cut.owner_of(name) in (None, place) or not isinstance(value, Tensor)
        return value if is_here or value.shape != own[name].shape else own[name]  # which torch copies onto itself

    load_sharded(cut.model, {name: wanted(name, value) for name, value in state.items()}, strict)


def part_of(tensor: Tensor, groups: PipelineGroups, *, is_here: bool) -> Tensor:
    """A tensor of the layers of one place as the part that this process has, in the same memory: nothing of it where it
    has other layers. Local.

    Args:
        tensor: of the process, whole or sharded, or what keeps its shape.
        groups: of the processes.
        is_here: whether it is of this process's layers.
    Raises:
        ConfigError: its elements don't lie in memory in their order.
    """
    values = tensor.detach()
    if not is_here:
        return FlatPart(torch.empty(0, dtype=tensor.dtype, device=tensor.device), 0, tensor.shape)
    if is_sharded(values):
        return values
    if not values.is_contiguous():
        raise ConfigError(
            f"a weight of shape {tuple(values.shape)} lies in memory with the strides {values.stride()}, where "
            "strategy='pipeline' can't give its part. Make it contiguous in the task's __init__."
        )
    return FlatPart(values.view(-1), 0, values.shape, not groups.is_first)


@contextmanager
def writing_weights(cut: Cut, place: int) -> Iterator[None]:
    """A context in which whole weights can be loaded into the model; those of other places are left out. Local."""
    others = {id(parameter): parameter for parameter in cut.elsewhere(place)}
    nothing: Any = {key: FlatPart(torch.empty(0, dtype=each.dtype), 0, each.shape) for key, each in others.items()}
    held = [
        (module._parameters, name, parameter)
        for module in cut.model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in others
    ]
    try:
        for parameters, name, parameter in held:
            parameters[name] = nothing[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in held:
            parameters[name] = parameter


def optimizer_state(cut: Cut, groups: PipelineGroups, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict, of which each process has the parts of its layers, in the same memory. Collective:
    what others have is described to it.

    Raises:
        CheckpointError: on every process: the optimizer keeps something that can't be told.
    """
    state = optimizer.state_dict()
    owners = [cut.parameters.get(id(parameter), 0) for parameter in parameters_of(optimizer)]
    own = {number: values for number, values in state["state"].items() if owners[number] == groups.place}
    told = {str(number): {key: _describe(value) for key, value in values.items()} for number, values in own.items()}
    described: dict[int, Any] = {}
    for each in exchange(told, "description of the optimizer's state"):
        described |= {int(number): values for number, values in each.items()}
    kind = type(optimizer).__name__
    entries = {
        number: {
            key: _entry(key, each, own.get(number, {}).get(key), groups, kind)
            for key, each in described[number].items()
        }
        for number in sorted(described)
    }
    return {**state, "state": entries}


def load_optimizer_state(cut: Cut, place: int, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put the parts of a whole state, which every process has or can read, into the optimizer of this one. Local."""
    owners = dict(enumerate(cut.parameters.get(id(parameter), place) for parameter in parameters_of(optimizer)))
    own = {number: values for number, values in state["state"].items() if owners.get(number, place) == place}
    load_sharded_optimizer(optimizer, {**state, "state": own})


def _bring(value: Tensor, owner: int, groups: PipelineGroups) -> Tensor:
    """A tensor of one place's layers, on the host of the main process; elsewhere what shows its shape. Collective."""
    rank, source = dist.get_rank(), groups.rank_of(owner)
    found = whole(value) if owner == groups.place else value
    if rank == source != 0 and found.numel():
        dist.send(as_bytes(found), 0)
    if rank:
        return value
    if owner and found.numel():
        found = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        dist.recv(as_bytes(found), source)
    return found.cpu()


def _entry(key: str, described: Any, own: Any, groups: PipelineGroups, optimizer: str) -> Any:
    """An entry of an optimizer's state, of which this process may have a part. Local."""
    kind, value = described
    if kind == "refused":
        raise CheckpointError(
            f"{optimizer} keeps a {value} as {key!r}, which strategy='pipeline' can't tell other processes of. Use one "
            "whose state has plain tensors and numbers, or another strategy."
        )
    if kind == "value":
        return value
    dtype = getattr(torch, kind)
    if not isinstance(value, list):
        return torch.tensor(value, dtype=dtype)
    if own is None:
        return FlatPart(torch.empty(0, dtype=dtype), 0, torch.Size(value))
    return part_of(own, groups, is_here=True)


def _describe(value: Any) -> tuple[str, Any]:
    """What others are told of an entry of a state: a tensor's type and shape, or its value where it has one number; or
    a plain value."""
    if is_sharded(value) or type(value) is Tensor:
        is_number = value.dim() == 0 and not is_sharded(value)
        return str(value.dtype).removeprefix("torch."), value.item() if is_number else list(value.shape)
    if value is None or isinstance(value, (bool, int, float, str)):
        return "value", value
    return "refused", type(value).__name__
