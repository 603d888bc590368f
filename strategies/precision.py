"""Precision: the number formats of forward and backward, and the scaling of losses that fp16 needs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError, NonFiniteError, check_boolean, suggest
from ..distributed.nested import map_leaves
from .fp8_recipes import FP8Recipe, RecipeKwargs, read_recipe
from .handlers import AutocastKwargs
from .master_weights import keep_master_weights

ContextFactory: TypeAlias = Callable[[], AbstractContextManager[Any]]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Autocast:
    """Gives contexts of `torch.autocast`. Unlike these and unlike a gradient scaler it can be copied at any time."""

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = None
    """Keep the converted weights within one context. None: as torch is set."""

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


class DefaultFormat:
    """A context in which new tensors are in a format, by default."""

    __slots__ = ("_before", "_dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._before)


class Precision(ABC):
    """In which number formats a step computes, and weights are kept."""

    name: str = "no"
    """The word for the format of forward passes, `"no"` for the model's own."""

    compute_format: torch.dtype | None = None
    """The format of forward passes, None: the model's own."""

    autocasts: bool = False
    """Whether `autocast()` does anything: the loop enters no context where it does not."""

    scales: bool = False
    """Whether losses are scaled, so that gradients have to be unscaled: the loop asks for neither where not."""

    scaler: torch.amp.GradScaler | None = None
    """torch's scaler of losses, where this works with one."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which a forward pass runs."""

    def contexts(self, settings: AutocastKwargs) -> ContextFactory:
        """What gives such contexts with further settings; without torch's autocast there is nothing to set."""
        return self.autocast

    def prepare_model(self, model: nn.Module) -> None:
        """Bring a model's weights into the format in which they are kept, in place, before a strategy sets it up.
        Local.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """See to what an optimizer keeps beside the weights, once a strategy has set it up. Local.

        Raises:
            ConfigError: it can't be kept for these weights.
        """

    @property
    def convert_inputs(self) -> Callable[[Any], Any]:
        """What gives the nested inputs of a forward pass in the format that it needs; can be copied and pickled."""
        return _as_they_are

    def scale(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss

    def unscale(self, optimizer: Optimizer) -> bool:
        """Bring the optimizer's gradients back to their true size. Once per step; a second call does nothing.

        Returns:
            Whether the gradients are free of an overflow of the scaling, so that the step will be applied.
        """
        return True

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer. Returns whether the weights were updated."""
        optimizer.step()
        return True

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients were thrown away: nothing of them is unscaled any more."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class FullPrecision(Precision):
    """The model's own number formats."""

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class MixedPrecision(Precision):
    """Forward under autocast, weights and their updates in the model's own format.

    Args:
        device: where the model is.
        name: `"bf16"`; also `"fp16"`, whose small gradients are lost without the scaling of `ScaledPrecision`.
    """

    autocasts = True

    def __init__(self, device: torch.device, name: Literal["bf16", "fp16"] = "bf16") -> None:
        self.name = name
        self.compute_format = _DTYPES[name]
        self._context = Autocast(device.type, _DTYPES[name])

    def autocast(self) -> AbstractContextManager[Any]:
        return self._context()

    def contexts(self, settings: AutocastKwargs) -> ContextFactory:
        return replace(self._context, enabled=settings.enabled, cache_enabled=settings.cache_enabled)


class FP8Precision(MixedPrecision):
    """bf16, with the matrix products of linear layers in FP8: what `FP8Strategy` converts.

    Args:
        device: where the model is.
        recipe: how; None: what the run's handlers or the environment say.
    """

    def __init__(self, device: torch.device, recipe: FP8Recipe | None = None) -> None:
        super().__init__(device, "bf16")
        self.name = "fp8"
        self.recipe = recipe


class TruePrecision(Precision):
    """Weights, activations and updates in 16 bits, without autocast; so are a step's inputs and new tensors.

    Losses are not scaled, so that small gradients are lost in fp16.

    Args:
        name: `"bf16-true"` or `"fp16-true"`.
        master_weights: optimizers update a copy in fp32, which the weights are rounded from after each step.
    """

    autocasts = True

    def __init__(self, name: Literal["bf16-true", "fp16-true"] = "bf16-true", *, master_weights: bool = False) -> None:
        check_boolean(f"precision={name!r}: master_weights", master_weights)
        self.name = name
        self.weight_format = _DTYPES[name.removesuffix("-true")]
        self.master_weights = master_weights

    def autocast(self) -> AbstractContextManager[Any]:
        return DefaultFormat(self.weight_format)

    def contexts(self, settings: AutocastKwargs) -> ContextFactory:
        return _DefaultFormats(self.weight_format)

    def prepare_model(self, model: nn.Module) -> None:
        model.to(self.weight_format)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        if self.master_weights:
            keep_master_weights(optimizer)
            return
        for index, group in enumerate(optimizer.param_groups):
            eps = group.get("eps")
            if self.weight_format is torch.float16 and isinstance(eps, float) and 0 < eps < _SMALLEST_FP16:
                raise ConfigError(
                    f"precision={self.name!r}: eps={eps:g} of {type(optimizer).__name__} (group {index}) is 0 in fp16, "
                    "and what is divided by it not finite. Give eps=1e-4, master_weights=True, or use 'bf16-true'."
                )

    @property
    def convert_inputs(self) -> Callable[[Any], Any]:
        return _InFormat(self.weight_format)


@dataclass(frozen=True, slots=True)
class _DefaultFormats:
    """Gives contexts in which new tensors are in a format; can be copied and pickled."""

    dtype: torch.dtype

    def __call__(self) -> DefaultFormat:
        return DefaultFormat(self.dtype)


@dataclass(frozen=True, slots=True)
class _InFormat:
    """Brings floating-point tensors in nested data into a format; can be copied and pickled."""

    dtype: torch.dtype

    def __call__(self, data: Any) -> Any:
        return map_leaves(data, self._convert)

    def _convert(self, name: str, leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.dtype) if is_float else leaf


def _as_they_are(data: Any) -> Any:
    return data


class ScaledPrecision(MixedPrecision):
    """fp16: as bf16, with the loss scaled up so that small gradients survive, and overflowing steps dropped.

    Args:
        device: where the model is.
        scaler: torch's scaler; by default one for the device.
    """

    scales = True
    scaler: torch.amp.GradScaler

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler | None = None) -> None:
        super().__init__(device, "fp16")
        self.scaler = scaler or torch.amp.GradScaler(device.type)
        self._unscaled: dict[int, bool] = {}

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> bool:
        if id(optimizer) not in self._unscaled:
            apart = _whole_beside_parts(optimizer)
            for parameter, _ in apart:
                parameter.grad = None
            self.scaler.unscale_(optimizer)
            # Unscaling has looked for infinities. Reading its answer, and not whether `optimizer.step` was called or
            # the scale fell, is right for fused optimizers and for any growth and backoff.
            found: dict[Any, Tensor] = self.scaler._found_inf_per_device(optimizer)
            for parameter, gradient in apart:
                parameter.grad = gradient
                factor = self.scaler._scale.to(gradient.device).double().reciprocal().float()  # type: ignore[union-attr]
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], found[gradient.device], factor)
            self._unscaled[id(optimizer)] = not any(bool(flag.item()) for flag in found.values())
        return self._unscaled[id(optimizer)]

    def step(self, optimizer: Optimizer) -> bool:
        is_finite = self.unscale(optimizer)
        if is_finite:
            self.scaler.step(optimizer)
        self.forget(optimizer)
        if not is_finite and self.scaler.get_scale() < _SMALLEST_SCALE:
            raise NonFiniteError(
                "the loss scale of fp16 has fallen to almost 0, so that the gradients are not finite at any scale. "
                "Look for a NaN in the data or the model (NaNGuard names it), lower the learning rate, or use bf16."
            )
        return is_finite

    def forget(self, optimizer: Optimizer) -> None:
        # The scaler forgets all optimizers when it is updated, so the update waits for the last one that is unscaled.
        if self._unscaled.pop(id(optimizer), None) is not None and not self._unscaled:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:  # it is empty where the run had another precision, which the resume tells of
            self.scaler.load_state_dict(dict(state))


def _whole_beside_parts(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Parameters whose whole gradients the scaler would unscale in one call with gradients in parts, which torch can't,
    and these gradients. Local.
    """
    found = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = {(gradient.device, gradient.dtype) for _, gradient in found if is_sharded(gradient)}
    return [(p, g) for p, g in found if not is_sharded(g) and (g.device, g.dtype) in parts]


_SMALLEST_SCALE = 2.0**-40
_SMALLEST_FP16 = 2.0**-24

PRECISIONS = {
    "no": "no",
    "fp32": "no",
    "32": "no",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "fp8": "fp8",
    "bf16-true": "bf16-true",
    "fp16-true": "fp16-true",
    "16-true": "fp16-true",
}
"""Words for a precision, Lightning's among them, and what they mean."""

PrecisionLike: TypeAlias = "str | Mapping[str, Any] | RecipeKwargs | Precision"


def create_precision(
    spec: PrecisionLike | None, device: torch.device, *, scaler: torch.amp.GradScaler | None = None
) -> Precision:
    """The precision of a word, a mapping `{"name": ..., **options}`, or a recipe of FP8.

    Args:
        spec: None: the model's own formats. An object is returned as it is.
        device: where the model is.
        scaler: for fp16; by default a new one.
    Raises:
        ConfigError: the word or an option is unknown, or the device can't compute in that format.
    """
    if isinstance(spec, Precision):
        return spec
    if isinstance(spec, FP8Recipe):
        return FP8Precision(device, spec)
    word, options = _read(spec)
    kind = PRECISIONS[word]
    if kind == "fp8":
        return FP8Precision(device, read_recipe(options, "precision='fp8'") if options else None)
    if kind == "bf16-true" or kind == "fp16-true":
        _check_options(word, options, ("master_weights",))
        return TruePrecision(kind, **options)  # type: ignore[arg-type]
    _check_options(word, options, ())
    if kind == "no":
        return FullPrecision()
    if kind == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError(
                f"precision={word!r}: {torch.cuda.get_device_name(device)} has no bf16. Use 'fp16' or 'no'."
            )
        return MixedPrecision(device, "bf16")
    return ScaledPrecision(device, scaler)


def _read(spec: object) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    word = spec
    if isinstance(spec, Mapping):
        options = dict(spec)
        word = options.pop("name", None)
        if word is None:
            raise ConfigError(f"precision={dict(spec)!r} has no 'name'. Expected such as {{'name': 'fp8', ...}}.")
    word = "no" if word is None else str(word)
    if word not in PRECISIONS:
        raise ConfigError(f"precision={word!r} is unknown. {suggest(word, PRECISIONS)}")
    return word, options


def _check_options(word: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(f"precision={word!r} does not take {name!r}. {suggest(name, known)}")
