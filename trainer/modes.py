"""Modes that hold while a run goes on and are put back at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..distributed.errors import ConfigError, suggest
from .sealed import preserved_modes

MATMUL_PRECISIONS = ("highest", "high", "medium")


@contextmanager
def training_mode(task: nn.Module) -> Iterator[None]:
    """Train the task inside; afterwards every module's `training` flag is as before, also after an exception.

    A task that is in eval mode as a whole is switched to training. Where only parts of it are, they were frozen on
    purpose, such as a batch norm, and stay so.
    """
    with preserved_modes(task):
        if not task.training:
            task.train()
        yield


@contextmanager
def attribute_set(task: nn.Module, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of the task itself has a value; one of its own, other than None, comes back."""
    own = task.__dict__.get(name)
    task.__dict__[name] = value
    try:
        yield
    finally:
        task.__dict__.pop(name)
        if own is not None:
            task.__dict__[name] = own


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside, or raise where it has none; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if enabled:
            torch.use_deterministic_algorithms(before, warn_only=warns_only)


def check_matmul_precision(value: object) -> None:
    """Refuse what is no precision of products of fp32 numbers.

    Raises:
        ConfigError: says what is accepted.
    """
    if value is not None and value not in MATMUL_PRECISIONS:
        raise ConfigError(f"matmul_precision={value!r} is unknown. {suggest(value, MATMUL_PRECISIONS)}")


@contextmanager
def float32_products(precision: str | None) -> Iterator[None]:
    """Multiply fp32 matrices in this precision inside, None: as torch is set; afterwards as before."""
    if precision is None:  # torch 2.9 warns of reading what it is
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
