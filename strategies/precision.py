"""Precision: the number formats of forward and backward, and the scaling of losses that fp16 needs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.errors import ConfigError, NonFiniteError, suggest
from .handlers import AutocastKwargs

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


class Precision(ABC):
    """In which number format a step computes. The weights stay as the model has them."""

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
            self.scaler.unscale_(optimizer)
            # Unscaling has looked for infinities. Reading its answer, and not whether `optimizer.step` was called or
            # the scale fell, is right for fused optimizers and for any growth and backoff.
            found = self.scaler._found_inf_per_device(optimizer)
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


_SMALLEST_SCALE = 2.0**-40

PRECISIONS = {
    "no": "no",
    "fp32": "no",
    "32": "no",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "fp16": "fp16",
    "16-mixed": "fp16",
}
"""Words for a precision, Lightning's among them, and what they mean."""


def create_precision(
    name: str | Precision | None, device: torch.device, *, scaler: torch.amp.GradScaler | None = None
) -> Precision:
    """The precision of a word.

    Args:
        name: the word; None: the model's own formats. An object is returned as it is.
        device: where the model is.
        scaler: for fp16; by default a new one.
    Raises:
        ConfigError: the word is unknown, or the device can't compute in that format.
    """
    if isinstance(name, Precision):
        return name
    word = "no" if name is None else str(name)
    if word not in PRECISIONS:
        raise ConfigError(f"precision={name!r} is unknown. {suggest(word, PRECISIONS)}")
    kind = PRECISIONS[word]
    if kind == "no":
        return FullPrecision()
    if kind == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError(
                f"precision={name!r}: {torch.cuda.get_device_name(device)} has no bf16. Use 'fp16' or 'no'."
            )
        return MixedPrecision(device, "bf16")
    return ScaledPrecision(device, scaler)
