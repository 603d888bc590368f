"""Optimizer states that are tensors made of several: stored as these, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded

_PARTS = "parts"
"""The key under which such a tensor's parts stand in a state dict."""


def keep_states_flat(optimizer: Optimizer) -> None:
    """Let an optimizer's state dict hold the plain parts of states that are tensors of their own kinds, such as
    torchao's in 8 bits, and take such states back. Local.

    Args:
        optimizer: one of torchao's, which makes an empty state of its kind by `_new_buffer`.
    """
    optimizer.register_state_dict_post_hook(_flatten)
    optimizer.register_load_state_dict_pre_hook(_set_aside)
    optimizer.register_load_state_dict_post_hook(_fill)


def is_composed(value: object) -> bool:
    """Whether a value is a tensor of a kind of its own that is made of others, and of which processes have no parts.
    Local.
    """
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not is_sharded(value)


def _flatten(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state["state"] = {
        number: {name: _parts_of(value) for name, value in values.items()} for number, values in state["state"].items()
    }


def _parts_of(value: Any) -> Any:
    if not is_composed(value):
        return value
    names, _ = value.__tensor_flatten__()
    return {_PARTS: {name: getattr(value, name) for name in names}}


def _set_aside(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from bringing parts into the format of their parameter."""
    optimizer.__dict__["_loopwright_loaded"] = state["state"]
    return {**state, "state": {}}


@torch.no_grad()
def _fill(optimizer: Optimizer) -> None:
    loaded: dict[int, dict[str, Any]] = optimizer.__dict__.pop("_loopwright_loaded")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for number, values in loaded.items():
        parameter = parameters[number]
        state = optimizer.state[parameter]
        for name, value in values.items():
            state[name] = _filled(optimizer, parameter, name, value)


def _filled(optimizer: Any, parameter: Tensor, name: str, value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PARTS}:
        made = optimizer._new_buffer(parameter, _is_signed(name))
        for part, content in value[_PARTS].items():
            getattr(made, part).copy_(content)
        return made
    if isinstance(value, Tensor):
        return value.to(parameter.device) if name == "step" else value.to(parameter.device, parameter.dtype)
    return value


def _is_signed(name: str) -> bool:
    return name == "exp_avg"  # the others are squares
