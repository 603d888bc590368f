"""A model brought to an XLA device, where torch makes new parameters: shared ones stay one, and optimizers follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError
from .optimizer import move_optimizer_state, parameters_of


def move_model(model: nn.Module, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
    """Bring a model to the device; parameters and buffers that several modules share are shared there as well. Local.

    Returns:
        For each parameter and buffer that was replaced, by the `id` of the old one: the old and the new one.
    """
    holders = _holders(model)
    model.to(device)
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for old, places in holders.values():
        new = getattr(*places[0])
        if new is old:
            continue
        for module, name in places[1:]:
            setattr(module, name, new)
        new.__dict__.update(old.__dict__)  # what others have marked it with
        replaced[id(old)] = (old, new)
    return replaced


def follow(optimizers: Iterable[Optimizer], replaced: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Give optimizers the new parameters in place of the old ones, with their states. Local."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In place: some optimizers keep the list itself.
            group["params"][:] = [replaced.get(id(old), (old, old))[1] for old in group["params"]]
        for old in [parameter for parameter in optimizer.state if id(parameter) in replaced]:
            optimizer.state[replaced[id(old)][1]] = optimizer.state.pop(old)
        move_optimizer_state(optimizer)


def check_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose parameters are not those that are computed with. Local.

    Raises:
        ConfigError: names the first that is on another device.
    """
    for index, parameter in enumerate(parameters_of(optimizer)):
        if parameter.device.type != device.type:
            raise ConfigError(
                f"parameter {index} of {type(optimizer).__name__}, of shape {list(parameter.shape)}, is on "
                f"{parameter.device}, while the models are on {device}: a step would change nothing that is used. "
                "Moving a model there makes new parameters. Prepare a model together with its optimizers: "
                "accelerator.prepare(model, optimizer), or make the optimizer after that."
            )


def on_host(data: Any, known: dict[int, Tensor] | None = None) -> Any:
    """Nested mappings, lists and tuples with each tensor copied to the host; what is one tensor stays one. Local.

    Args:
        data: what a state dict holds.
        known: the copies so far, by the `id` of the tensor.
    """
    known = {} if known is None else known
    if isinstance(data, Tensor):
        if id(data) not in known:
            known[id(data)] = data.detach().cpu() if data.device.type != "cpu" else data.detach()
        return known[id(data)]
    if isinstance(data, Mapping):
        return {key: on_host(value, known) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(on_host(value, known) for value in data)
    return data


def _holders(model: nn.Module) -> dict[int, tuple[Tensor, Sequence[tuple[nn.Module, str]]]]:
    """Each parameter and buffer, by its `id`, with the modules that hold it and its names there."""
    found: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found.setdefault(id(tensor), (tensor, []))[1].append((module, name))
    return dict(found)
