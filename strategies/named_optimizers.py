"""Optimizers by name: torch's, and those of bitsandbytes and torchao that keep their states in 8 bits or fewer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.errors import ConfigError, suggest
from ..distributed.imports import require
from .flat_states import keep_states_flat
from .torchao_package import import_torchao

_TORCH = {
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "muon": "Muon",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
_BITSANDBYTES = {
    "adagrad8bit": "Adagrad8bit",
    "adam8bit": "Adam8bit",
    "adamw8bit": "AdamW8bit",
    "ademamix8bit": "AdEMAMix8bit",
    "lamb8bit": "LAMB8bit",
    "lion8bit": "Lion8bit",
    "paged_adam8bit": "PagedAdam8bit",
    "paged_adamw8bit": "PagedAdamW8bit",
    "paged_lion8bit": "PagedLion8bit",
    "rmsprop8bit": "RMSprop8bit",
    "sgd8bit": "SGD8bit",
}
_TORCHAO = {
    "adam8bit_ao": "Adam8bit",
    "adam4bit_ao": "Adam4bit",
    "adamfp8_ao": "AdamFp8",
    "adamw8bit_ao": "AdamW8bit",
    "adamw4bit_ao": "AdamW4bit",
    "adamwfp8_ao": "AdamWFp8",
}
OPTIMIZERS = (*_TORCH, *_BITSANDBYTES, *_TORCHAO)
"""Every name."""


def create_optimizer(
    spec: str | Mapping[str, Any], parameters: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
) -> Optimizer:
    """An optimizer by its name.

    Args:
        spec: one of `OPTIMIZERS`: torch's in lower case, `"adamw8bit"`, ... of bitsandbytes, `"adamw8bit_ao"`, ... of
            torchao; or a mapping `{"name": ..., **options}`.
        parameters: as torch's optimizers take them.
        options: of the optimizer; those of the mapping come before them.
    Raises:
        ConfigError: the name or an option is unknown.
        MissingDependencyError: its package is not installed.
    """
    if isinstance(spec, Mapping):
        options = {**options, **spec}
        spec = options.pop("name", "")
    kind = _find(spec)
    known = inspect.signature(kind).parameters
    for name in options:
        if name not in known:
            raise ConfigError(f"optimizer {spec!r} does not take {name!r}. {suggest(name, set(known) - {'params'})}")
    made: Optimizer = kind(parameters, **options)
    if spec in _TORCHAO:
        keep_states_flat(made)
    return made


def _find(name: object) -> Any:
    if name in _BITSANDBYTES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its import, about devices that are not there
            package = require("bitsandbytes.optim", extra="quantize", purpose=f"optimizer {name!r}")
        return getattr(package, _BITSANDBYTES[str(name)])
    if name in _TORCHAO:
        return getattr(import_torchao("torchao.optim", f"optimizer {name!r}"), _TORCHAO[str(name)])
    found = getattr(torch.optim, _TORCH.get(str(name), ""), None)
    if found is None:
        raise ConfigError(f"optimizer {name!r} is unknown. {suggest(name, OPTIMIZERS)}")
    return found
