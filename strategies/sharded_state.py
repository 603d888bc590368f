"""States of sharded models and of their optimizers, whole on the main process, and put back into the parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.sharded import fill_part, is_sharded, whole
from ..distributed.errors import ConfigError
from .optimizer import parameters_of


def whole_model_state(model: nn.Module, keeps: bool) -> dict[str, Any]:
    """A model's state dict with whole tensors on the host, empty where it is not kept. Collective.

    One tensor at a time is put together on the device. Tied parameters stay one.
    """
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_sharded(value):
            if id(value) not in known:
                known[id(value)] = _on_host(value.detach(), keeps)
            value = known[id(value)]
        state[name] = value.detach() if isinstance(value, Tensor) else value
    return state if keeps else {}


def load_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Put a whole state, which every process has, into a model of which it has a part. Local."""
    own = model.state_dict(keep_vars=True)
    values = {
        name: fill_part(own[name], value) if name in own and _fits(own[name], value) else value
        for name, value in state.items()
    }
    model.load_state_dict(values, strict=strict)


def whole_optimizer_state(optimizer: Optimizer, keeps: bool) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors on the host, without them where it is not kept. Collective."""
    state = optimizer.state_dict()
    entries: dict[Any, Any] = {}
    for number, values in sorted(state["state"].items()):
        found = {
            key: _on_host(value, keeps) if is_sharded(value) else value
            for key, value in sorted(values.items(), key=lambda each: str(each[0]))
        }
        entries[number] = {key: found[key] for key in values}
    return {"state": entries if keeps else {}, "param_groups": state["param_groups"]}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put a whole state, which every process has, into an optimizer of parts. Local."""
    numbered = dict(enumerate(parameters_of(optimizer)))
    entries = {number: _in_parts(numbered.get(number), values) for number, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": entries})


def rebuild(optimizer: Optimizer, model: nn.Module, names: Mapping[int, str]) -> None:
    """Give an optimizer the parameters that a model has now for those that it was made with. Local.

    Groups, hyperparameters and state stay; of the state's tensors each process keeps its part.

    Args:
        optimizer: made with the model's parameters as they were before.
        model: sharded since.
        names: of its parameters before, by `id`.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    new = {number: parameters[name] for number, name in names.items()}
    states = [(new[id(old)], values) for old, values in optimizer.state.items()]
    for group in optimizer.param_groups:
        group["params"] = [new[id(parameter)] for parameter in group["params"]]
    optimizer.state.clear()
    for parameter, values in states:
        optimizer.state[parameter] = _in_parts(parameter, values)


def check_parameters(optimizer: Optimizer, model: nn.Module, known: Mapping[int, Any]) -> None:
    """Refuse an optimizer of other parameters than a model's. Local.

    Raises:
        ConfigError: says how many, and their shapes.
    """
    others = [list(p.shape) for p in parameters_of(optimizer) if id(p) not in known]
    if others:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(others)} parameters that {type(model).__name__} does not have (the "
            f"first of shape {others[0]}): its parameters were replaced since, as sharding does, or they are another "
            "model's. Make the optimizer from model.parameters(), and set both up together: "
            "accelerator.prepare(model, optimizer)."
        )


def _on_host(value: Tensor, keeps: bool) -> Tensor:
    full = whole(value)
    return full.cpu() if keeps else torch.empty(0)


def _fits(mine: Any, value: Any) -> bool:
    return is_sharded(mine) and isinstance(value, Tensor) and not is_sharded(value) and mine.shape == value.shape


def _in_parts(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state; tensors of its shape become parts as its own is one."""
    return {key: _as_part(parameter, value) if _fits(parameter, value) else value for key, value in values.items()}


def _as_part(parameter: Any, value: Tensor) -> Tensor:
    return fill_part(torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False), value)
