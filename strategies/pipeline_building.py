"""How a model becomes a pipeline: what can't be one, and the layers dealt to the processes with process 0's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError
from .averaging import broadcast_tensors
from .pipeline_layers import Cut, free, is_freed
from .pipeline_shards import StageShards, shared_parameters


def check_served(model: nn.Module, optimizers: Sequence[Optimizer], method: str | None) -> None:
    """Refuse what can't be trained in a pipeline. Local, alike on all processes.

    Args:
        model: with its optimizers.
        optimizers: of its parameters.
        method: as `Strategy.setup` takes it.
    Raises:
        ConfigError: a loop calls the model or its parts, or there are several optimizers.
    """
    name = type(model).__name__
    if method == "forward":
        raise ConfigError(
            f"{name} was passed to accelerator.prepare, and strategy='pipeline' has to make the passes itself. Use "
            "a Trainer with a Task that has pipeline_layers."
        )
    if method is None and optimizers:
        raise ConfigError(
            f"{name} is trained by manual optimization, which strategy='pipeline' can't serve: forward and backward"
            " of a batch's parts are one call there. Use automatic optimization, or 'ddp'."
        )
    if len(optimizers) > 1:
        raise ConfigError(
            f"{name} has {len(optimizers)} optimizers, and strategy='pipeline' steps one. Put their parameters "
            "into groups of one optimizer."
        )


def check_scaled(cut: Cut) -> None:
    """Refuse stages whose gradients can't tell of an overflow of fp16. Local, alike on all processes.

    Raises:
        ConfigError: a process has nothing to train.
    """
    for place in {*cut.owners}:
        if not cut.trained_by(place):
            raise ConfigError(
                f"precision='fp16' with strategy='pipeline': process {place} has no trainable parameter in its "
                f"stages of {type(cut.model).__name__}. Use 'bf16', or let split= give it one."
            )


def check_held(model: nn.Module) -> None:
    """Refuse a model of which this process has no values. Local.

    Raises:
        ConfigError: names a parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_freed(parameter):
            where = "on the meta device" if parameter.is_meta else "in the pipeline of another Trainer"
            raise ConfigError(
                f"parameter {name} of {type(model).__name__} is {where}. Make the task anew with values, on all "
                "processes; a checkpoint brings back those that were trained."
            )


def deal(cut: Cut, place: int, device: torch.device, shards: StageShards | None) -> None:
    """Give all layers the values of process 0, and keep those of one place, one layer after another. Collective.

    Args:
        cut: of the model.
        place: of this process in its pipeline.
        device: where it computes.
        shards: what spreads its layers over pipelines side by side.
    """
    operation = f"setup of {type(cut.model).__name__}"
    layers = [(owner, layer) for owner, stage in zip(cut.owners, cut.stages, strict=True) for layer in stage]
    shared = shared_parameters([layer for _, layer in layers])
    inside: set[int] = set()
    for owner, layer in layers:
        layer.to(device)
        tensors = [each for each in _tensors(layer) if id(each) not in inside]
        inside |= {id(tensor) for tensor in tensors}
        for tensor in tensors:  # parts of weights, and of states that follow their strides, are flat ranges
            tensor.data = tensor.data.contiguous()
        broadcast_tensors(tensors, operation)
        if owner != place:
            _give_away(layer, device)
        elif shards is not None:
            shards.spread(layer, shared)
    held = {id(each) for _, layer in layers for each in _tensors(layer)}
    left = [each for each in _tensors(cut.model) if id(each) not in held]
    for tensor in left:
        tensor.data = tensor.data.to(device)
    broadcast_tensors(left, operation)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _give_away(layer: nn.Module, device: torch.device) -> None:
    """Keep the shapes alone of a layer that another process has. Local."""
    for parameter in layer.parameters():
        free(parameter, device)
    for module in layer.modules():
        module.register_forward_pre_hook(_refuse_call)


def _refuse_call(module: nn.Module, args: Any) -> None:
    """A hook on layers whose weights another process has."""
    raise ConfigError(
        f"{type(module).__name__} was called in a process that has no weights of it, with strategy='pipeline'. Compute "
        "losses by self.run_pipeline(batch); other outputs and predictions need another strategy."
    )
