"""DDP under `Accelerator` on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loopwright.local_sgd import LocalSGD
from loopwright.strategies.ddp import DDPStrategy
from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import DistributedDataParallelKwargs
from loopwright.trainer.accelerator import Accelerator

Run = Callable[..., list[Any]]


def prepared(accelerator: Accelerator) -> tuple[nn.Module, nn.Parameter, Any]:
    """A layer of one weight, 0, with its optimizer."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    return model, layer.weight, optimizer


def _windows(inputs: list[list[float]], plugin: dict[str, Any]) -> list[float]:
    """The gradient after each micro-batch, and the weight at the end."""
    plugin_object = GradientAccumulationPlugin(num_steps=len(inputs[0]), **plugin)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin_object)
    model, weight, optimizer = prepared(accelerator)
    found = []
    for value in inputs[accelerator.process_index]:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[value]])).sum())
            assert weight.grad is not None
            found.append(weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return [*found, weight.item()]


def test_b08_the_last_micro_batch_synchronises(two_processes: Run) -> None:
    inputs = [[1.0, 2.0], [3.0, 6.0]]
    assert two_processes(_windows, inputs, {}) == [[0.5, 3.0, -3.0], [1.5, 3.0, -3.0]]


def test_f24_each_batch_may_synchronise(two_processes: Run) -> None:
    inputs = [[1.0, 1.0], [2.0, 2.0]]
    assert two_processes(_windows, inputs, {}) == [[0.5, 1.5, -1.5], [1.0, 1.5, -1.5]]
    assert two_processes(_windows, inputs, {"sync_each_batch": True}) == [[0.75, 1.5, -1.5]] * 2


def _handled() -> tuple[str, float, bool, bool]:
    handler = DistributedDataParallelKwargs(comm_hook="fp16", gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model, weight, _ = prepared(accelerator)
    accelerator.backward(model(torch.tensor([[0.1 * (accelerator.process_index + 1)]])).sum())
    assert weight.grad is not None
    assert isinstance(model, DistributedDataParallel)
    is_plain = type(accelerator.unwrap_model(model)) is nn.Linear
    return type(accelerator.strategy).__name__, weight.grad.item(), model.gradient_as_bucket_view, is_plain


def test_a_handler_reaches_the_wrapper(two_processes: Run) -> None:
    assert two_processes(_handled) == [(DDPStrategy.__name__, 0.14990234375, True, True)] * 2


def _local_sgd() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model, weight, optimizer = prepared(accelerator)
    weights = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        for step in range(3):
            accelerator.backward(-model(torch.tensor([[accelerator.process_index + 1.0]])).sum())
            optimizer.step()
            optimizer.zero_grad()
            if step != 1:
                local_sgd.step()
            weights.append(weight.item())
            if step == 1:
                local_sgd.step()
    return [*weights, weight.item()]


def test_f27_local_sgd(two_processes: Run) -> None:
    # After the second step the mean of 2 and 4 is taken: 3 on both.
    assert two_processes(_local_sgd) == [[1.0, 2.0, 4.0, 4.5], [2.0, 4.0, 5.0, 4.5]]


def _clipped() -> tuple[float, float]:
    accelerator = Accelerator(cpu=True)
    model, weight, _ = prepared(accelerator)
    accelerator.backward(model(torch.tensor([[6.0 * accelerator.process_index]])).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.5)
    assert weight.grad is not None
    return norm.item(), weight.grad.item()


def test_gradients_are_clipped_by_the_norm_of_their_mean(two_processes: Run) -> None:
    for norm, gradient in two_processes(_clipped):
        assert norm == pytest.approx(3.0)
        assert gradient == pytest.approx(1.5)


def _triggered() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model, weight, _ = prepared(accelerator)
    with accelerator.no_sync(model):
        loss = model(torch.tensor([[accelerator.process_index + 1.0]])).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert weight.grad is not None
    return [weight.grad.item()]


def test_a_backward_may_be_told_to_synchronise(two_processes: Run) -> None:
    assert two_processes(_triggered) == [[1.5], [1.5]]
