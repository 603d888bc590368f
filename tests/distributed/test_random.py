"""Seeds and random states over processes. F: facts of semantics about Accelerate."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.random import set_seed, synchronize_rng_state, synchronize_rng_states


def draws(generator: torch.Generator) -> list[float]:
    return [
        torch.rand(1).item(), random.random(), float(numpy.random.rand()), torch.rand(1, generator=generator).item(),
    ]  # fmt: skip


def test_f18c_seeds_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [set_seed(10, device_specific=True, process_index=index) for index in range(3)] == [10, 11, 12]
    assert set_seed(10, device_specific=True) == 10
    assert set_seed(2**32 - 1, device_specific=True, process_index=1) == 0
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert set_seed(10, device_specific=True) == 11  # launched, and not connected yet


def test_what_can_not_be_synchronized_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rng_type='torhc' is no random state.*Did you mean 'torch'\?"):
        synchronize_rng_states(["torch", "torhc"])
    with pytest.raises(ConfigError, match=r'got "generator" without one'):
        synchronize_rng_state("generator")
    with pytest.raises(ConfigError, match=r"rng_types='torch'\)\. Expected a list of texts: \['torch'\]"):
        synchronize_rng_states("torch")
    with pytest.raises(ConfigError, match=r"rng_type='None' is no random state"):
        synchronize_rng_state()
    before = torch.get_rng_state()
    synchronize_rng_states(["torch", "python", "numpy", "generator"], torch.Generator())
    assert torch.equal(before, torch.get_rng_state())


def _states() -> Any:
    r = dist.get_rank()
    seed = set_seed(5, device_specific=True)
    generator = torch.Generator().manual_seed(seed)
    random.gauss(0, 1)
    own = draws(generator)
    synchronize_rng_states(["torch", "generator"], generator)
    some = draws(generator)
    synchronize_rng_states([])
    synchronize_rng_state("python")
    synchronize_rng_state("numpy")
    return seed - 5 == r, own, some, draws(generator)


def test_processes_go_on_from_the_states_of_process_0(two_processes: Any) -> None:
    first, second = two_processes(_states)
    assert (first[0], second[0]) == (True, True)

    def alike(index: int) -> list[bool]:
        return [a == b for a, b in zip(first[index], second[index], strict=True)]

    assert alike(1) == [False, False, False, False]
    assert alike(2) == [True, False, False, True]
    assert alike(3) == [True, True, True, True]
