"""Random states: seeding them, and carrying them over something that must leave no trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .errors import ConfigError


def check_seed(seed: object, option: str = "seed") -> None:
    """Refuse what is no seed for each of Python, NumPy and torch.

    Raises:
        ConfigError: it is no integer from 0 to 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f"{option}={seed!r}. Expected an integer from 0 to 2**32 - 1, or None.")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False, *, process_index: int = 0) -> int:
    """Seed Python, NumPy and torch on all devices.

    Args:
        seed: any non-negative integer below 2**32.
        device_specific: add `process_index`, so that each process draws its own numbers.
        deterministic: also make torch use deterministic algorithms, or raise where it has none.
        process_index: this process's index.
    Returns:
        The seed that was used.
    """
    if device_specific:
        seed += process_index
    random.seed(seed)
    torch.manual_seed(seed)  # seeds every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states of this process."""

    python: tuple[Any, ...]
    numpy: Any
    """NumPy's state, None while NumPy has not been imported."""
    torch_cpu: torch.Tensor
    device: torch.Tensor | None
    """The accelerator's generator state, None on the CPU."""


def get_random_state(device: torch.device) -> RandomState:
    """The states as they are now. Local."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch_cpu=torch.get_rng_state(),
        device=None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    )


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the states back. Local."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.torch_cpu)
    if state.device is not None:
        torch.get_device_module(device).set_rng_state(state.device, device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """A context after which the random states are as they were before it, also after an exception."""
    state = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)
