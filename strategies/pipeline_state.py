"""States of a model whose layers are in several processes, and of its optimizer: whole on the main one, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.flat import FlatPart
from ..checkpoint.stored import read_all
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.exchange import exchange
from ..distributed.sending import as_bytes
from .optimizer import parameters_of
from .pipeline_layers import Cut, free


def whole_model_state(cut: Cut) -> dict[str, Any]:
    """A model's state dict with the values of all stages, on the main process alone. Collective.

    One tensor at a time is sent there, by the pipeline that it is in. Tied parameters stay one.
    """
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in cut.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = _bring(value.detach(), cut.owner_of(name) or 0)
            value = known[id(value)]
        state[name] = value
    return state if dist.get_rank() == 0 else {}


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

    cut.model.load_state_dict({name: wanted(name, value) for name, value in state.items()}, strict=strict)


def part_of(tensor: Tensor, is_here: bool, is_copy: bool = False) -> FlatPart:
    """A tensor of one process as its part: all of it there, in the same memory, and nothing of it elsewhere. Local.

    Args:
        tensor: of the process, or what keeps its shape.
        is_here: whether it is this process's.
        is_copy: whether the process is in a pipeline beside the first.
    Raises:
        ConfigError: its elements don't lie in memory in their order.
    """
    if is_here and not tensor.is_contiguous():
        raise ConfigError(
            f"a weight of shape {tuple(tensor.shape)} lies in memory with the strides {tensor.stride()}, where "
            "strategy='pipeline' can't give callbacks its part. Make it contiguous in the task's __init__."
        )
    values = tensor.detach()
    return FlatPart(values.view(-1) if is_here else values.new_empty(0), 0, tensor.shape, is_copy)


@contextmanager
def writing_weights(cut: Cut, place: int, device: torch.device) -> Iterator[None]:
    """A context in which all parameters can be written into; those of other places are forgotten after it. Local."""
    others = cut.elsewhere(place)
    for parameter in others:
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    try:
        yield
    finally:
        for parameter in others:
            free(parameter, device)


def whole_optimizer_state(cut: Cut, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """An optimizer's state dict with the states of all stages, on the host of the main process; elsewhere its groups
    alone. Collective. One tensor at a time is sent.

    Raises:
        CheckpointError: on every process: the optimizer keeps something that can't be sent.
    """
    state, rank = optimizer.state_dict(), dist.get_rank()
    owners = [cut.parameters.get(id(parameter), 0) for parameter in parameters_of(optimizer)]
    own = {number: values for number, values in state["state"].items() if owners[number] == rank}
    told = {str(number): {key: _describe(value) for key, value in values.items()} for number, values in own.items()}
    described: dict[int, Any] = {}
    for each in exchange(told, "gathering of the optimizer's state"):
        described |= {int(number): values for number, values in each.items()}
    entries: dict[int, Any] = {}
    for number in sorted(described):
        entries[number] = {}
        for key, (kind, value) in described[number].items():
            if kind == "refused":
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {value} as {key!r}, which strategy='pipeline' can't send to "
                    "the main process. Use one whose state has plain tensors and numbers, or another strategy."
                )
            if kind == "value":
                entries[number][key] = value
                continue
            like = own[number][key] if number in own else torch.empty(value, dtype=getattr(torch, kind))
            entries[number][key] = _bring(like.detach().to(device), owners[number]).cpu()
    return {**state, "state": entries if rank == 0 else {}}


def load_optimizer_state(cut: Cut, place: int, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put the parts of a whole state, which every process has or can read, into the optimizer of this one. Local."""
    owners = dict(enumerate(cut.parameters.get(id(parameter), place) for parameter in parameters_of(optimizer)))
    own = {number: values for number, values in state["state"].items() if owners.get(number, place) == place}
    optimizer.load_state_dict(read_all({**state, "state": own}))


def _bring(value: Tensor, owner: int) -> Tensor:
    """A tensor of one process, on the main one; others give its shape alone."""
    rank = dist.get_rank()
    if owner == 0 or value.numel() == 0:
        return value
    if rank == owner:
        dist.send(as_bytes(value), 0)
    elif rank == 0:
        value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        dist.recv(as_bytes(value), owner)
        return value.cpu()
    return value


def _describe(value: Any) -> tuple[str, Any]:
    """What others are told of an entry of a state: a tensor's type and shape, or a plain value."""
    if type(value) is Tensor:
        return str(value.dtype).removeprefix("torch."), list(value.shape)
    if value is None or isinstance(value, (bool, int, float, str)):
        return "value", value
    return "refused", type(value).__name__
