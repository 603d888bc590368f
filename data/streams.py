"""The random streams of this process that data draws from, put aside and back quickly enough for every batch."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MERSENNE_TWISTER_BYTES = 624 * 4 + 4  # its words, and its place in them


class NumpyState(NamedTuple):
    """NumPy's global random state."""

    memory: bytes | None
    """What the Mersenne Twister has in memory, None for other generators."""
    full: dict[str, Any]

    @property
    def is_memory(self) -> bool:
        """Whether the memory is all of it: no second number of a pair of normal ones waits."""
        return self.memory is not None and not self.full["has_gauss"]


class Streams(NamedTuple):
    """The states of Python's, NumPy's and torch's random streams."""

    python: tuple[Any, ...]
    numpy: NumpyState | None
    """None while NumPy has not been imported."""
    torch_cpu: Tensor


def streams_now(known: Streams | None = None) -> Streams:
    """The states as they are now. Local.

    Args:
        known: states of before, from which NumPy's is taken if it is still the same: copying it is what costs.
    """
    numpy_state = None
    if "numpy" in sys.modules:
        numpy_state = _numpy_now(sys.modules["numpy"].random, None if known is None else known.numpy)
    return Streams(random.getstate(), numpy_state, torch.default_generator.get_state())


def put_streams(streams: Streams) -> None:
    """Put the states back. Local."""
    random.setstate(streams.python)
    if streams.numpy is not None:
        _put_numpy(sys.modules["numpy"].random, streams.numpy)
    torch.default_generator.set_state(streams.torch_cpu)


def seed_all(seed: int) -> None:
    """Begin the streams from a seed. Local."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _numpy_now(numpy_random: Any, known: NumpyState | None) -> NumpyState:
    address = _address(numpy_random)
    memory = None if address is None else ctypes.string_at(address, _MERSENNE_TWISTER_BYTES)
    # A number that waits could be taken without a trace in the memory; where none did, only the memory can change that.
    if known is not None and known.is_memory and memory == known.memory:
        return known
    full = numpy_random.get_state(legacy=False)
    if memory is not None:
        place = int(full["state"]["pos"]).to_bytes(4, sys.byteorder)
        if memory != full["state"]["key"].tobytes() + place:
            memory = None  # laid out in another way
    return NumpyState(memory, full)


def _put_numpy(numpy_random: Any, state: NumpyState) -> None:
    address = _address(numpy_random)
    if address is None or state.memory is None or not state.is_memory:
        numpy_random.set_state(state.full)
        return
    numpy_random.seed(0)  # so that no number waits
    ctypes.memmove(address, state.memory, _MERSENNE_TWISTER_BYTES)


def _address(numpy_random: Any) -> int | None:
    """Where the global generator has its state, None if it is no Mersenne Twister or NumPy is too old to tell."""
    get = getattr(numpy_random, "get_bit_generator", None)
    generator: Any = None if get is None else get()
    if type(generator).__name__ != "MT19937":
        return None
    address: int = generator.ctypes.state_address
    return address
