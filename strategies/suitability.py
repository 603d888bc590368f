"""Which models can be trained in data-parallel copies."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.comparing import is_alike_everywhere
from ..distributed.environment import read_flag
from ..distributed.errors import ConfigError, ShapeMismatchError
from ..distributed.exchange import exchange

_QUANTISED = ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized")
"""Attributes with which a model says that its weights are quantised."""
_ADAPTED = ("peft_config", "_hf_peft_config_loaded")
"""Attributes of a model with adapters, which are trained in place of its weights."""


def is_trainable(model: nn.Module) -> bool:
    """Whether a parameter of the model is to be trained. Local."""
    return any(parameter.requires_grad for parameter in model.parameters())


def ignores_device_maps() -> bool:
    """Whether the environment says that models with a device map are trained as they are. Local."""
    return bool(read_flag("BYPASS_DEVICE_MAP"))


def check_replicable(model: nn.Module) -> None:
    """Refuse a model that can't be copied to each process and trained there. Local.

    Raises:
        ConfigError: it is quantised, spread over devices, or not yet initialised.
    """
    name = type(model).__name__
    maps = [found for part in model.modules() if len(found := _device_map(part)) > 1]
    places = sorted({str(place) for found in maps for place in found.values()})
    if places and not ignores_device_maps():
        raise ConfigError(
            f"{name} has a device map over {', '.join(places)}, and strategy='ddp' trains a whole copy in each process."
            " Load it without device_map, or use strategy='single'. ACCELERATE_BYPASS_DEVICE_MAP=true trains it as it "
            "is, where each process has devices of its own."
        )
    flags = [flag for part in model.modules() for flag in _QUANTISED if getattr(part, flag, False) is True]
    if flags and not any(hasattr(part, mark) for part in model.modules() for mark in _ADAPTED):
        raise ConfigError(
            f"{name} is quantised ({flags[0]}), and its quantised weights have no gradients. Train adapters on it "
            "(peft), or load it without quantisation."
        )
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {path} of {name} has no shape yet, as its layer is lazy. Call the model once before it is"
                " set up (in configure_model), or give the layer its sizes."
            )


def check_whole(model: nn.Module) -> None:
    """Refuse a model whose parameters are spread or cut over processes already. Local.

    Raises:
        ConfigError: names the first of them.
    """
    sharded = _sharded_name(model)
    if sharded is not None:
        raise ConfigError(
            f"parameter {sharded} of {type(model).__name__} is a DTensor, which strategy='ddp' can't average. Give "
            "it a model of plain tensors."
        )


def check_trained(model: nn.Module, optimizers: Sequence[Optimizer], method: str | None) -> None:
    """Refuse to train a model in which nothing is to be trained. Local.

    Raises:
        ConfigError: it has optimizers, or training calls a method of its own, and no parameter requires a gradient.
    """
    if is_trainable(model) or not (optimizers or method != "forward"):
        return
    name = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise ConfigError(
            f"{name} has no parameters, so that there is nothing to train. Create its layers in __init__ or "
            "configure_model."
        )
    raise ConfigError(
        f"{name} has no trainable parameter: all {sum(1 for _ in model.parameters())} have requires_grad=False. "
        "Unfreeze those that are to be trained; a model that is only evaluated needs no optimizer."
    )


def check_alike(model: nn.Module) -> None:
    """Refuse a model that differs from those of other processes. Collective: one small one if all is well.

    torch would notice some differences on some processes, and leave the others waiting.

    Raises:
        ShapeMismatchError: on every process: names the first parameter or buffer that differs, as each process has it.
    """
    name = type(model).__name__
    lines = _description(model)
    if is_alike_everywhere(lines, f"setup of {name}"):
        return
    for found in zip_longest(*exchange(lines, f"comparison of {name}"), fillvalue="nothing"):
        if len(set(found)) > 1:
            shown = "\n".join(f"  process {index}: {line}" for index, line in enumerate(found))
            raise ShapeMismatchError(
                f"{name} is not the same model on all processes; the first difference is\n{shown}\nBuild it from the "
                "same arguments everywhere, and freeze the same parameters."
            )


def synchronised_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with batch norms whose statistics are those of all processes. Local.

    Raises:
        ConfigError: torch has no such layer for the device.
    """
    if device.type == "cpu":
        raise ConfigError(
            "sync_batchnorm=True: torch synchronises batch norm on accelerators alone, and this process computes on the"
            " CPU. Leave it out, or use layers without batch statistics (GroupNorm, LayerNorm)."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def check_batchnorm(model: nn.Module, device: torch.device) -> None:
    """Refuse SyncBatchNorm layers on the CPU, where torch has none. Local.

    Raises:
        ConfigError: names the layer.
    """
    layers = [path for path, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if layers and device.type == "cpu":
        raise ConfigError(
            f"layer {layers[0] or type(model).__name__} is a SyncBatchNorm, which torch has for accelerators alone, and"
            " this process computes on the CPU. Use BatchNorm, GroupNorm or LayerNorm."
        )


def _description(model: nn.Module) -> list[str]:
    """One line for each parameter and buffer that the processes are to share."""
    own = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = [(n, p, "trained" if p.requires_grad else "frozen") for n, p in model.named_parameters()]
    buffers = [(n, b, "buffer") for n, b in model.named_buffers()]
    return [f"{n} {list(t.shape)} {t.dtype}, {kind}" for n, t, kind in [*parameters, *buffers] if n not in own]


def _device_map(part: nn.Module) -> Mapping[str, Any]:
    found = getattr(part, "hf_device_map", None)
    return found if isinstance(found, Mapping) else {}


def _sharded_name(model: nn.Module) -> str | None:
    # Nobody has made a DTensor where their module was never imported, and it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    return next((name for name, parameter in model.named_parameters() if isinstance(parameter, module.DTensor)), None)
