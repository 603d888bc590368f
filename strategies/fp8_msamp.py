"""FP8 by Microsoft's MS-AMP. It is written against its documented interface and has not run here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError, MissingDependencyError
from .fp8_backend import FP8Backend
from .fp8_recipes import MSAMPRecipeKwargs

_FORMATS = "_loopwright_formats"
"""The attribute of a converted model with the formats that its weights had, by name."""
_HELP = (
    "It needs an NVIDIA device with compute capability 8.9 or more, a CUDA build of torch, and is built from source: "
    "pip install git+https://github.com/Azure/MS-AMP. backend='ao' (pip install 'loopwright[fp8]') runs everywhere."
)


@final
class MSAMPBackend(FP8Backend):
    """Lets MS-AMP keep weights and gradients (`"O1"`), and the optimizer's states (`"O2"`), in FP8.

    Args:
        recipe: what the user gave.
        device: where models compute.
    Raises:
        MissingDependencyError: it can't be loaded.
        ConfigError: the device is no CUDA device.
    """

    def __init__(self, recipe: MSAMPRecipeKwargs, device: torch.device) -> None:
        self._recipe = recipe
        self._package = _import_msamp()
        if device.type != "cuda":
            raise ConfigError(f"fp8 by MS-AMP on a device of type {device.type!r}. {_HELP}")
        self._device = device

    @property
    def restrictions(self) -> str | None:
        return "MS-AMP's weights are of its own kind, which can't be spread over processes. Use backend='ao', or 'ddp'."

    def convert(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        if not optimizers:
            return []  # an evaluation computes with plain weights
        if len(optimizers) > 1:
            raise ConfigError(
                f"fp8 by MS-AMP: {type(model).__name__} came with {len(optimizers)} optimizers. It converts a model "
                "with its one optimizer."
            )
        if _FORMATS in model.__dict__:
            raise ConfigError(f"fp8 by MS-AMP: {type(model).__name__} was converted before. Make it anew.")
        model.__dict__[_FORMATS] = {name: value.dtype for name, value in model.state_dict().items()}
        model.to(self._device)  # it converts where the weights are
        converted, optimizer = self._package.initialize(model, optimizers[0], opt_level=self._recipe.opt_level)
        if converted is not model:
            raise ConfigError(f"fp8 by MS-AMP: the installed version wraps {type(model).__name__}. {_HELP}")
        model.register_state_dict_post_hook(_make_plain)
        return [optimizer]

    def restore(self, model: nn.Module) -> None:
        """Weights stay MS-AMP's: it has no way back. State dicts are plain all the same."""


def _make_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Bring weights of MS-AMP's kind, and its 16-bit ones, into the formats that they had."""
    formats = module.__dict__[_FORMATS]
    for name, value in state.items():
        wanted: torch.dtype | None = formats.get(name.removeprefix(prefix))
        if wanted is None:
            continue
        is_plain = isinstance(value, Tensor) and value.dtype == wanted
        state[name] = value if is_plain and not hasattr(value, "meta") else value.float().to(wanted)


def _import_msamp() -> Any:
    try:
        return importlib.import_module("msamp")
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingDependencyError(f"fp8 by MS-AMP: it can't be loaded ({error}). {_HELP}") from error
