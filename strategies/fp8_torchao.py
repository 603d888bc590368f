"""FP8 by torchao."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded, part_like
from ..distributed.errors import ConfigError
from .fp8_backend import FP8Backend
from .fp8_layers import (
    BlockScaledLinear,
    choose_layers,
    convert_layer,
    in_autocast_format,
    is_converted,
    named_sizes,
    restore_layer,
)
from .fp8_recipes import AORecipeKwargs
from .torchao_package import import_torchao

_LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
"""CUDA's compute capability from which on there are such products."""
_AMD = ("gfx94", "gfx95", "gfx12")
"""What AMD's devices with FP8 are called."""
_PURPOSE = "precision='fp8' by torchao"
_WATCHED = "_loopwright_plain_states"


@final
class TorchAOBackend(FP8Backend):
    """Lets linear layers be torchao's: they compute in FP8 from weights that stay as they are.

    Args:
        recipe: what the user gave.
        device: where models compute.
        warns: whether this process says what is emulated or left out.
    Raises:
        MissingDependencyError: torchao is not installed.
    """

    def __init__(self, recipe: AORecipeKwargs, device: torch.device, warns: bool) -> None:
        self.recipe = recipe
        self.emulates = self._decide(device) if recipe.emulate is None else recipe.emulate
        self._warns = warns
        gathers = recipe.enable_fsdp_float8_all_gather
        if recipe.config is not None:
            gathers = recipe.config.enable_fsdp_float8_all_gather
        self.gathers = (device.type != "cpu" and recipe.is_tensorwise) if gathers is None else gathers
        """Whether weights that are spread over processes are gathered in FP8."""
        is_block_scaled = recipe.recipe.startswith("mxfp8")
        self._kind, self._attributes = self._block_scaled() if is_block_scaled else self._scaled()
        self._multiple = 32 if is_block_scaled else 16
        if warns and self.emulates and recipe.emulate is None:
            warnings.warn(
                f"fp8: {_name_of(device)} can't compute in FP8 with recipe {recipe.recipe!r}: it is emulated, with the "
                "same numbers, slower and with no less memory than bf16. Give emulate=True to say that this is meant.",
                stacklevel=2,
            )

    def convert(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        recipe = self.recipe
        choice = choose_layers(
            model,
            self._multiple,
            accepts=recipe.module_filter_func,
            skip=recipe.skip,
            first_and_last=recipe.first_and_last,
        )
        if choice.odd and self._warns and not any(map(is_converted, choice.layers.values())):
            warnings.warn(
                f"fp8: layers of {type(model).__name__} stay in high precision, since their sizes are no multiples of "
                f"{self._multiple}{named_sizes(choice.odd, ': ')}. Leave them out by skip=[...] to say that this is "
                "meant.",
                stacklevel=2,
            )
        for layer in choice.layers.values():
            convert_layer(layer, self._kind, self._attributes)
        return list(optimizers)

    def restore(self, model: nn.Module) -> None:
        for module in model.modules():
            restore_layer(module, list(self._attributes))

    def before_sharding(self, holders: Sequence[tuple[nn.Module, str]]) -> None:
        if not self.gathers:
            return
        parameters = [getattr(module, name) for module, name in holders]
        layers = [
            module
            for (module, name), parameter in zip(holders, parameters, strict=True)
            if is_converted(module) and name == "weight" and sum(parameter is each for each in parameters) == 1
        ]
        if layers and len(layers) == len(holders) and layers[0].weight.device.type == "cpu":
            raise ConfigError(
                "fp8: enable_fsdp_float8_all_gather=True, and a unit holds weights in FP8 alone, which processes on "
                "the CPU can't send. Leave it out, or wrap larger units."
            )
        for layer in layers:
            layer.weight = self._sent_in_fp8(layer)

    def after_step(self, model: nn.Module) -> None:
        if self.gathers and any(_inner_of(p) is not None for p in model.parameters()):
            import_torchao("torchao.float8", _PURPOSE).precompute_float8_dynamic_scale_for_fsdp(model)

    def forget_scales(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if _inner_of(parameter) is not None:
                parameter._local_tensor._precomputed_scale = None  # type: ignore[attr-defined]

    def _decide(self, device: torch.device) -> bool:
        kind = "mxfp8" if self.recipe.recipe.startswith("mxfp8") else "tensorwise"
        if kind == "tensorwise" and not self.recipe.is_tensorwise:
            kind = "rowwise"
        return not _computes(device, kind)

    def _scaled(self) -> tuple[type[nn.Module], dict[str, Any]]:
        """Torchao's layer with factors per tensor or row, and the attributes that it reads."""
        float8 = import_torchao("torchao.float8", _PURPOSE)
        config = self.recipe.config
        if config is None:
            made = float8.Float8LinearConfig.from_recipe_name(self.recipe.recipe)
            config = dataclasses.replace(made, pad_inner_dim=self.recipe.pad_inner_dim)
        config = dataclasses.replace(
            config, emulate=self.emulates or config.emulate, enable_fsdp_float8_all_gather=False
        )
        plain = nn.Linear(16, 16, bias=False, device="meta")
        holder = nn.Sequential(nn.Linear(16, 16, bias=False, device="meta"))
        layer = float8.convert_to_float8_training(holder, config=config)[0]
        attributes = {name: value for name, value in vars(layer).items() if name not in vars(plain)}
        return _in_autocast(type(layer)), attributes  # type: ignore[arg-type]  # mypy: classes have no hash

    def _block_scaled(self) -> tuple[type[nn.Module], dict[str, Any]]:
        """A layer with factors per block, and the function that it reads."""
        config = import_torchao("torchao.prototype.moe_training.config", _PURPOSE)
        products = import_torchao("torchao.prototype.moe_training.mxfp8_linear", _PURPOSE)
        try:
            recipes = config.MXFP8TrainingRecipe
            chosen = recipes.MXFP8_EMULATED_RCEIL if self.emulates else recipes.MXFP8_RCEIL
            settings = config.MXFP8TrainingOpConfig.from_recipe(chosen)
            compute = functools.partial(
                products._to_mxfp8_then_scaled_mm,  # torchao has nothing public that computes from plain weights
                kernel_preference=settings.kernel_preference,
                scale_calculation_mode=settings.scale_calculation_mode,
                wgrad_with_hp=self.recipe.recipe == "mxfp8_with_gw_hp",
            )
        except AttributeError as error:
            version = import_torchao("torchao", _PURPOSE).__version__
            raise ConfigError(
                f"recipe={self.recipe.recipe!r}: torchao {version} has it under other names ({error}). Install the "
                "version that this was made for: pip install torchao==0.18.0"
            ) from error
        return BlockScaledLinear, {"compute": compute}

    def _sent_in_fp8(self, layer: nn.Module) -> nn.Parameter:
        """A layer's weight, in the same memory, as torchao's kind that `fully_shard` gathers in FP8."""
        utilities = import_torchao("torchao.float8.fsdp_utils", _PURPOSE)
        weight: Any = layer.weight
        target = self._attributes["config"].cast_config_weight.target_dtype
        sent = utilities.WeightWithDynamicFloat8CastTensor(weight.data, self._attributes["linear_mm_config"], target)
        return nn.Parameter(sent, requires_grad=weight.requires_grad)


def keep_states_plain(model: nn.Module) -> None:
    """Let the state dicts of a model hold plain weights where it has torchao's kind of them, in the same memory.
    Local.
    """
    if _WATCHED not in model.__dict__:
        model.__dict__[_WATCHED] = True
        model.register_state_dict_post_hook(_make_plain)  # type: ignore[no-untyped-call]


def plain_part(tensor: Tensor) -> Tensor:
    """A tensor without torchao's kind of part in it, in the same memory; another is itself. Local."""
    inner = _inner_of(tensor)
    return tensor if inner is None else part_like(tensor, inner)


def _make_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    known: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and _inner_of(value) is not None:
            state[name] = known.setdefault(id(value), plain_part(value))


def _inner_of(tensor: Any) -> Tensor | None:
    """The plain part inside of torchao's kind of it, None for any other tensor."""
    local = getattr(tensor, "_local_tensor", None) if is_sharded(tensor) else None
    # Of a kind that only who has imported torchao can have made.
    is_sent = local is not None and type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
    return local._tensor if is_sent else None  # type: ignore[union-attr]


@functools.cache
def _in_autocast(kind: Any) -> type[nn.Module]:
    """Torchao's layer with inputs in the format of the autocast of any device; its own looks at CUDA's alone."""

    class Float8Linear(kind):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            outputs: Tensor = super().forward(in_autocast_format(input))
            return outputs

    return Float8Linear


def _computes(device: torch.device, kind: str) -> bool:
    """Whether a device has such products."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        name = str(torch.cuda.get_device_properties(device).gcnArchName)
        return name.startswith(_AMD) and kind != "mxfp8"
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY[kind]


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a device of type {device.type!r}"
