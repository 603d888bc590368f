"""Random states: seeding them, and carrying them over something that must leave no trace."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import group, xla
from .errors import ConfigError, suggest
from .exchange import broadcast_encoded


def check_seed(seed: object, option: str = "seed") -> None:
    """Refuse what is no seed for each of Python, NumPy and torch.

    Raises:
        ConfigError: it is no integer from 0 to 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f"{option}={seed!r}. Expected an integer from 0 to 2**32 - 1, or None.")


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, process_index: int | None = None
) -> int:
    """Seed Python, NumPy and torch on all devices. Local.

    Args:
        seed: any non-negative integer below 2**32.
        device_specific: add this process's index, so that each process draws its own numbers.
        deterministic: also make torch use deterministic algorithms, or raise where it has none.
        process_index: the index to add; by default that in torch's process group, or before there is one what the
            launcher says.
    Returns:
        The seed that was used.
    """
    if device_specific:
        seed = (seed + (group.index_and_count()[0] if process_index is None else process_index)) % 2**32
    random.seed(seed)
    torch.manual_seed(seed)  # seeds every device
    xla.seed(seed)  # but those of torch_xla
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give every process the random states of process 0. Collective.

    Args:
        rng_types: which; see `synchronize_rng_state`.
        generator: the one that the word "generator" means.
    Raises:
        ConfigError: one of the words can't be used.
    """
    if isinstance(rng_types, str):
        raise ConfigError(
            f"synchronize_rng_states(rng_types={rng_types!r}). Expected a list of texts: [{rng_types!r}]."
        )
    # All are looked up before anything is sent.
    states = [_rng_access(word, generator) for word in rng_types]
    for state in states:
        _synchronize(*state)


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every process one of the random states of process 0. Collective.

    Args:
        rng_type: "torch" (its generator of the CPU), a type of device such as "cuda" (that of this process's current
            device), "generator" (that of the argument), "python", or "numpy".
        generator: the one that the word "generator" means.
    Raises:
        ConfigError: the word is unknown, there is no such device, or "generator" came without one.
    """
    synchronize_rng_states(["None" if rng_type is None else rng_type], generator)


def _synchronize(get: Callable[[], Any], put: Callable[[Any], object]) -> None:
    if group.world_size() > 1:
        state = broadcast_encoded(lambda: pickle.dumps(get()), 0, "synchronize_rng_states")
        put(pickle.loads(state))


def _rng_access(word: str, generator: torch.Generator | None) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """How a random state is read and written."""
    word = str(getattr(word, "value", word))  # a member of an enumeration as well
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if word == "generator":
        if generator is None:
            raise ConfigError('synchronize_rng_states got "generator" without one. Pass generator=, or leave it out.')
        return generator.get_state, generator.set_state
    if word == xla.DEVICE_TYPE and xla.is_started():
        return xla.get_rng_state, xla.set_rng_state
    if accelerator is not None and word == accelerator.type:
        module = torch.get_device_module(accelerator)
        return module.get_rng_state, module.set_rng_state
    known: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "python": (random.getstate, random.setstate),
        "numpy": (_numpy_state, _set_numpy_state),
    }
    if word not in known:
        names = [*known, "generator", *([accelerator.type] if accelerator else [])]
        raise ConfigError(f"rng_type={word!r} is no random state of this machine. {suggest(word, names)}")
    return known[word]


def _numpy_state() -> Any:
    import numpy

    return numpy.random.get_state()


def _set_numpy_state(state: Any) -> None:
    import numpy

    numpy.random.set_state(state)


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
        device=None if device.type == "cpu" else _device_state(device),
    )


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the states back. Local."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.torch_cpu)
    if state.device is not None:
        _set_device_state(state.device, device)


def _device_state(device: torch.device) -> torch.Tensor:
    if device.type == xla.DEVICE_TYPE:
        return xla.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _set_device_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == xla.DEVICE_TYPE:
        xla.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """A context after which the random states are as they were before it, also after an exception."""
    state = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def random_tree(device: torch.device) -> dict[str, Any]:
    """The random states of this process as plain values and tensors, for a checkpoint. Local.

    Args:
        device: where the process computes; its generator is among them unless it is the CPU.
    """
    state = get_random_state(device)
    version, numbers, gauss = state.python
    tree: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "torch": state.torch_cpu,
    }
    if state.numpy is not None:
        algorithm, keys, position, has_gauss, cached = state.numpy
        tree["numpy"] = {
            "algorithm": algorithm,
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        }
    if state.device is not None:
        tree[device.type] = state.device
    return tree


def restore_random_tree(tree: Mapping[str, Any], device: torch.device) -> list[str]:
    """Put back the states that `random_tree` gave. Local.

    Returns:
        What it does not hold of what this process draws from, such as the generator of another type of device.
    """
    python = tree["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    torch.set_rng_state(tree["torch"])
    if (saved := tree.get("numpy")) is not None:
        import numpy

        keys = numpy.array(saved["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(
            (saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["cached_gaussian"])
        )
    missing = ["numpy"] if saved is None and "numpy" in sys.modules else []
    if device.type == "cpu":
        return missing
    if device.type not in tree:
        return [*missing, device.type]
    _set_device_state(tree[device.type], device)
    return missing
