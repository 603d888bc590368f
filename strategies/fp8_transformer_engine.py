"""FP8 by NVIDIA's Transformer Engine. It is written against its documented interface and has not run here."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError, MissingDependencyError
from .fp8_backend import FP8Backend
from .fp8_recipes import TERecipeKwargs

EXTRA_STATE = "_extra_state"
"""The last part of the names under which its layers keep what they know of earlier steps: pickled, so in no state."""

_PLAIN = "_loopwright_plain_layer"
"""The attribute of one of its layers that holds the layer in whose place it stands."""
_WATCHED = "_loopwright_without_extra_state"
_MULTIPLE = 16
_HELP = (
    "It needs an NVIDIA device with compute capability 8.9 or more (Ada, Hopper, Blackwell) and a CUDA build of torch: "
    "pip install --no-build-isolation 'transformer_engine[pytorch]'. backend='ao' (pip install 'loopwright[fp8]') runs "
    "everywhere."
)


@final
class TransformerEngineBackend(FP8Backend):
    """Puts Transformer Engine's layers in the places of linear layers and layer norms, with the same parameters.

    Args:
        recipe: what the user gave.
        device: where models compute.
        warns: whether this process says what is left out.
    Raises:
        MissingDependencyError: it can't be loaded.
        ConfigError: the device can't compute so.
    """

    has_context = True

    def __init__(self, recipe: TERecipeKwargs, device: torch.device, warns: bool) -> None:
        self._recipe = recipe
        self._device = device
        self._warns = warns
        self._engine, recipes = _import_engine()
        _check_device(self._engine, device, bool(recipe.use_mxfp8_block_scaling))
        self.settings = _settings(recipe, recipes, warns)
        """Its own recipe object."""

    @property
    def restrictions(self) -> str | None:
        return "Transformer Engine's layers are replaced by others, which sharding does not follow. Use backend='ao'."

    def convert(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        odd: list[str] = []
        count = 0
        for parent, key, name, layer in _places(model):
            if any(re.fullmatch(pattern, name) for pattern in self._recipe.skip):
                continue
            if isinstance(layer, nn.Linear) and any(size % _MULTIPLE for size in layer.weight.shape):
                odd.append(f"{name} ({layer.in_features} x {layer.out_features})")
                continue
            parent._modules[key] = self._counterpart(layer)
            count += isinstance(layer, nn.Linear)
        if count == 0 and not has_engine_layers(model):
            raise ConfigError(
                f"fp8: no linear layer of {type(model).__name__} is left to convert; of these sizes are no multiples "
                f"of {_MULTIPLE}: {', '.join(odd) or 'none'}. Give others, or train without fp8."
            )
        if odd and count and self._warns:
            warnings.warn(
                f"fp8: layers of {type(model).__name__} stay in high precision, since their sizes are no multiples of "
                f"{_MULTIPLE}: {', '.join(odd)}. Leave them out by skip=[...] to say that this is meant.",
                stacklevel=2,
            )
        _keep_states_plain(model)
        return list(optimizers)

    def restore(self, model: nn.Module) -> None:
        for parent in list(model.modules()):
            for key, layer in list(parent._modules.items()):
                if layer is not None and _PLAIN in layer.__dict__:
                    plain = layer.__dict__[_PLAIN][0]
                    for name, parameter in layer.named_parameters(recurse=False):
                        setattr(plain, name, parameter)
                    plain.train(layer.training)
                    parent._modules[key] = plain

    def context(self, is_training: bool) -> AbstractContextManager[object]:
        enabled = is_training or bool(self._recipe.use_autocast_during_eval)
        context: AbstractContextManager[object] = self._engine.fp8_autocast(enabled=enabled, fp8_recipe=self.settings)
        return context

    def _counterpart(self, layer: nn.Module) -> nn.Module:
        """Its layer for one of torch's, which has the same parameters."""
        options: dict[str, Any] = {"params_dtype": layer.weight.dtype, "device": self._device}
        made: nn.Module
        if isinstance(layer, nn.Linear):
            made = self._engine.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, **options)
        else:
            assert isinstance(layer, nn.LayerNorm)
            made = self._engine.LayerNorm(layer.normalized_shape[0], eps=layer.eps, **options)
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(made, name, parameter)
        made.train(layer.training)
        made.__dict__[_PLAIN] = (layer,)  # in a tuple, so that it is no child
        return made


def has_engine_layers(model: nn.Module) -> bool:
    """Whether a model has layers that were put in the places of others. Local."""
    return any(_PLAIN in module.__dict__ for module in model.modules())


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """The linear layers and layer norms that have a counterpart: what holds each, under which key, and the name."""
    for path, parent in list(model.named_modules()):
        for key, layer in list(parent._modules.items()):
            is_norm = type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1
            has_both = is_norm and layer is not None and layer.weight is not None and layer.bias is not None
            if layer is not None and (type(layer) is nn.Linear or has_both):
                yield parent, key, f"{path}.{key}" if path else key, layer


def _keep_states_plain(model: nn.Module) -> None:
    """Leave what its layers know of earlier steps out of the state dicts of a model, and don't miss it in one."""
    if _WATCHED in model.__dict__:
        return
    model.__dict__[_WATCHED] = True
    model.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(_do_not_miss)  # type: ignore[no-untyped-call]


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name in [name for name in state if name.rpartition(".")[2] == EXTRA_STATE]:
        del state[name]


def _do_not_miss(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [n for n in incompatible.missing_keys if n.rpartition(".")[2] != EXTRA_STATE]


def _import_engine() -> tuple[Any, Any]:
    """Transformer Engine for torch, and its recipes.

    Raises:
        MissingDependencyError: it can't be loaded; has the pip command and the device that it needs.
    """
    try:
        recipes = importlib.import_module("transformer_engine.common.recipe")
        engine = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError) as error:  # it raises RuntimeError where its compiled part is missing
        raise MissingDependencyError(f"fp8 by Transformer Engine: it can't be loaded ({error}). {_HELP}") from error
    return engine, recipes


def _check_device(engine: Any, device: torch.device, by_blocks: bool) -> None:
    if device.type != "cuda":
        raise ConfigError(f"fp8 by Transformer Engine on a device of type {device.type!r}. {_HELP}")
    checks = engine.fp8
    is_there, why = checks.check_mxfp8_support() if by_blocks else checks.check_fp8_support()
    if not is_there:
        raise ConfigError(f"fp8 by Transformer Engine: {why}. {_HELP}")


def _settings(recipe: TERecipeKwargs, recipes: Any, warns: bool) -> Any:
    """Its recipe object; fields that the installed version does not have are left out, with a warning if they matter.

    Raises:
        ConfigError: fields contradict each other.
    """
    kind = recipes.MXFP8BlockScaling if recipe.use_mxfp8_block_scaling else recipes.DelayedScaling
    default = TERecipeKwargs()
    wanted = {
        name: getattr(recipe, name)
        for name in ("margin", "interval", "amax_history_len", "amax_compute_algo", "override_linear_precision")
    }
    known = inspect.signature(kind).parameters
    changed = [name for name, value in wanted.items() if name not in known and value != getattr(default, name)]
    if changed and recipe.use_mxfp8_block_scaling:
        raise ConfigError(
            f"TERecipeKwargs(use_mxfp8_block_scaling=True) has no {', '.join(changed)}, which go with factors per "
            "tensor. Leave out one of them."
        )
    if changed and warns:
        warnings.warn(
            f"TERecipeKwargs({', '.join(changed)}) has no effect: the installed Transformer Engine has no such option.",
            stacklevel=2,
        )
    return kind(
        fp8_format=getattr(recipes.Format, str(recipe.fp8_format)),
        **{name: value for name, value in wanted.items() if name in known},
    )
