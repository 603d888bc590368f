"""`LocalSGD`; the numbers are F27 of the reference semantics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.process import ProcessState
from loopwright.local_sgd import LocalSGD
from loopwright.strategies.ddp import DDPStrategy
from loopwright.strategies.gradient_state import GradientState
from loopwright.strategies.precision import FullPrecision

Run = Callable[..., list[Any]]


class Owner:
    """As much of an `Accelerator` as this needs."""

    def __init__(self) -> None:
        self.strategy = DDPStrategy()
        self.strategy.attach(ProcessState(cpu=True), FullPrecision(), GradientState())

    @property
    def num_processes(self) -> int:
        return self.strategy.process.num_processes

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.strategy.no_sync(model)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return self.strategy.unwrap(model)


def weights_of_three_steps(enabled: bool = True, fails: bool = False) -> list[float]:
    """The weight after each of three steps and after leaving, from 0, with a gradient of -(process index + 1)."""
    owner = Owner()
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    model, _ = owner.strategy.setup(layer, [optimizer])
    inputs = torch.tensor([[-(owner.strategy.process.process_index + 1.0)]])
    weights = []
    try:
        with LocalSGD(owner, model, local_sgd_steps=2, enabled=enabled) as local_sgd:
            for step in range(3):
                optimizer.zero_grad()
                owner.strategy.backward(model(inputs).sum())
                owner.strategy.step(optimizer)
                if step == 1:
                    weights.append(layer.weight.item())
                local_sgd.step()
                weights.append(layer.weight.item())
            if fails:
                raise KeyError("own")
    except KeyError:
        pass
    return [*weights, layer.weight.item()]


def test_weights_are_averaged_every_few_steps_and_at_the_end(two_processes: Run) -> None:
    # After the second step once before the mean (2 and 4) and once after it.
    assert two_processes(weights_of_three_steps) == [[1.0, 2.0, 3.0, 4.0, 4.5], [2.0, 4.0, 3.0, 5.0, 4.5]]


def test_switched_off_it_averages_gradients(two_processes: Run) -> None:
    assert two_processes(weights_of_three_steps, False) == [[1.5, 3.0, 3.0, 4.5, 4.5]] * 2


def test_after_an_exception_nothing_is_averaged(two_processes: Run) -> None:
    first, second = two_processes(weights_of_three_steps, True, True)
    assert (first[-1], second[-1]) == (4.0, 5.0)


def test_in_one_process_it_does_nothing() -> None:
    assert weights_of_three_steps() == [1.0, 2.0, 2.0, 3.0, 3.0]


def test_its_number_of_steps() -> None:
    with pytest.raises(ConfigError, match=r"LocalSGD\(local_sgd_steps=0\)\. Expected an integer >= 1"):
        LocalSGD(Owner(), nn.Linear(1, 1), 0)
