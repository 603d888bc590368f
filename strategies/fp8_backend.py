"""`FP8Backend`: what a library that computes in FP8 does to a model, and which one a recipe is for."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from .fp8_recipes import AORecipeKwargs, FP8Recipe, MSAMPRecipeKwargs


class FP8Backend(ABC):
    """Converts models in place, so that their linear layers compute in FP8, and back."""

    has_context: bool = False
    """Whether forward passes have to be in `context`."""

    @property
    def restrictions(self) -> str | None:
        """What it can't do under a strategy that spreads weights over processes; None: it can."""
        return None

    @abstractmethod
    def convert(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Convert a model, before it is placed and wrapped. Local.

        Args:
            model: any module; one that was converted before stays so.
            optimizers: of its parameters.
        Returns:
            The optimizers in the same order.
        Raises:
            ConfigError: no layer can be converted, or the combination can't work.
        """

    @abstractmethod
    def restore(self, model: nn.Module) -> None:
        """Give a converted model its own layers back, with the weights that they have now. Local."""

    def context(self, is_training: bool) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return contextlib.nullcontext()

    def before_sharding(self, holders: Sequence[tuple[nn.Module, str]]) -> None:
        """Called with the modules and names of each unit's parameters before they are spread over processes. Local."""

    def after_step(self, model: nn.Module) -> None:
        """Called after a step that has changed a model's weights. Collective where these are spread."""

    def forget_scales(self, model: nn.Module) -> None:
        """The weights were written otherwise: what is known of their sizes is not right any more. Local."""


def make_backend(recipe: FP8Recipe, device: torch.device, warns: bool) -> FP8Backend:
    """The backend of a recipe. Local; it imports the library, which takes seconds.

    Args:
        recipe: whose class says which backend.
        device: where models compute.
        warns: whether this process says what is emulated or left out.
    Raises:
        MissingDependencyError: the library is not installed, or can't be loaded.
        ConfigError: the device can't compute so.
    """
    if isinstance(recipe, AORecipeKwargs):
        from .fp8_torchao import TorchAOBackend

        return TorchAOBackend(recipe, device, warns)
    if isinstance(recipe, MSAMPRecipeKwargs):
        from .fp8_msamp import MSAMPBackend

        return MSAMPBackend(recipe, device)
    from .fp8_transformer_engine import TransformerEngineBackend

    return TransformerEngineBackend(recipe, device, warns)
