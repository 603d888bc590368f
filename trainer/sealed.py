"""Sealed validation: an evaluation inside training leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..data.loader import PreparedLoader
from ..distributed.random import preserved_random_state
from ..strategies.gradient_state import GradientState


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """A context after which every module's `training` flag is as before, also after an exception."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def preserved_gradients(module: nn.Module) -> Iterator[None]:
    """A context after which every parameter has the gradient that it had before, also after an exception."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # a backward inside would add to it in place
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def preserved_gradient_state(state: GradientState) -> Iterator[None]:
    """A context after which the training loader's flags and the open window are as before, also after an exception."""
    kept = (state.sync_gradients, state.window_size, state.micro_steps, list(state.loaders))
    try:
        yield
    finally:
        state.sync_gradients, state.window_size, state.micro_steps, state.loaders[:] = kept


@contextmanager
def preserved_generators(loaders: Iterable[PreparedLoader]) -> Iterator[None]:
    """A context after which the loaders' own generators are as before: the training loader may share one of them."""
    states = [(generator, generator.get_state()) for loader in loaders for generator in loader.generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def sealed(
    task: nn.Module, device: torch.device, gradient_state: GradientState, loaders: Iterable[PreparedLoader]
) -> Iterator[None]:
    """Evaluate the task inside: eval mode, no gradients. Afterwards everything is as it was, also after an exception.

    That is: random states, those of the loaders too, module modes, gradients, gradient mode, autocast state, and the
    training loader's flags.
    """
    with (
        preserved_random_state(device),
        preserved_generators(loaders),
        preserved_modes(task),
        preserved_gradients(task),
        preserved_gradient_state(gradient_state),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        task.eval()
        yield
