"""Copies in fp32 of weights that are kept in 16 bits: what optimizers update, so that small steps are not lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError

KEY = "master_weight"
"""The name of the copy in a parameter's part of the optimizer's state dict."""

_HALVES = (torch.float16, torch.bfloat16)
_ATTRIBUTE = "_loopwright_master_weights"
"""The attribute of an optimizer that holds its copies."""


def keep_master_weights(optimizer: Optimizer) -> MasterWeights:
    """Let an optimizer update copies in fp32; a second call does nothing. Local.

    Raises:
        ConfigError: its parameters are spread over processes.
    """
    known = vars(optimizer)
    if _ATTRIBUTE not in known:
        known[_ATTRIBUTE] = MasterWeights(optimizer)
    found: MasterWeights = known[_ATTRIBUTE]
    return found


class MasterWeights:
    """The copies of one optimizer's parameters, made at its first step, and stored in its state dict.

    A step is made on the copies in the place of the parameters, then these get the rounded values. Where a weight was
    written since, and is no more what its copy rounds to, the copy follows it.

    Args:
        optimizer: any of torch's; it need not know.
    Raises:
        ConfigError: its parameters are spread over processes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        sharded = next((p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)), None)
        if sharded is not None:
            raise ConfigError(
                f"master_weights=True, and a parameter of {type(optimizer).__name__} is spread over processes. Use "
                "precision='bf16': the parts are in fp32 then, and are gathered and computed with in bf16."
            )
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: dict[nn.Parameter, int] = {}
        """Of each parameter, how often it had been written when it got its copy's value."""
        self._places: list[list[Any]] = []
        """While the copies stand in for the parameters, these; else nothing."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._add)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _halves(optimizer):
            gradient = parameter.grad
            if gradient is None and parameter not in self._copies:
                continue  # frozen yet, or a layer of another process in a pipeline
            self._follow(parameter)
            self._copies[parameter].grad = None if gradient is None else gradient.float()
        self._put_in(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._take_out(optimizer)
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                if copy.grad is not None:
                    parameter.copy_(copy)
                    self._versions[parameter] = parameter._version
                copy.grad = None

    def _follow(self, parameter: nn.Parameter) -> None:
        copy = self._copies.get(parameter)
        if copy is None or copy.device != parameter.device:
            self._copies[parameter] = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        elif self._versions.get(parameter) != parameter._version:
            with torch.no_grad():
                is_kept = parameter == copy.to(parameter.dtype)
                copy.copy_(torch.where(is_kept, copy, parameter.float()))
        self._versions[parameter] = parameter._version

    def _put_in(self, optimizer: Optimizer) -> None:
        """Let the copies stand in for the parameters, with their state."""
        self._places = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._copies.get(parameter, parameter) for parameter in group["params"]]
        for parameter, copy in self._copies.items():
            if parameter in optimizer.state:
                optimizer.state[copy] = optimizer.state.pop(parameter)

    def _take_out(self, optimizer: Optimizer) -> None:
        """Let the parameters stand in their places again."""
        for group, parameters in zip(optimizer.param_groups, self._places, strict=True):
            group["params"] = parameters
        self._places = []
        for parameter, copy in self._copies.items():
            if copy in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(copy)

    def _add(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Add the copies to a state dict."""
        entries = dict(state["state"])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if parameter in self._copies:
                self._follow(parameter)
                entries[number] = {**entries.get(number, {}), KEY: self._copies[parameter].detach()}
        state["state"] = entries

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        # torch brings a state into the format of its parameter: that of the copy.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if number in state["state"] and parameter.dtype in _HALVES:
                self._follow(parameter)
        self._put_in(optimizer)

    def _after_load(self, optimizer: Optimizer) -> None:
        self._take_out(optimizer)
        for parameter in _halves(optimizer):
            entry = optimizer.state.get(parameter, {})
            stored: Tensor | None = entry.pop(KEY, None)
            if stored is not None:
                with torch.no_grad():
                    self._copies[parameter].copy_(stored)
                if not entry:
                    del optimizer.state[parameter]
            self._versions.pop(parameter, None)  # the weights may be loaded after it, from what is rounded alike


def _halves(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """An optimizer's parameters in 16 bits."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.dtype in _HALVES)
