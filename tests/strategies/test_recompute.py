"""Activation checkpointing: what is kept of a forward pass, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.recompute import RecomputedForward, recompute


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Tanh(), nn.Linear(50, 2))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # of the dropout
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_those_of_kept_activations() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    wanted = gradients(net(), x)
    for offloads in (False, True):
        model = net()
        recompute(model, offloads=offloads)
        torch.testing.assert_close(gradients(model, x), wanted, atol=0, rtol=0)


def test_of_all_activations_the_inputs_alone_are_kept() -> None:
    """The context for what is kept sees one tensor; without recomputation the hooks see those between as well."""
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    def keeping() -> Any:
        return saved_tensors_hooks(keep, lambda tensor: tensor)

    model, x = net(), torch.randn(4, 3, requires_grad=True)
    with keeping():
        model(x)
    assert (4, 50) in kept
    kept.clear()
    model.forward = RecomputedForward(model, keeping)  # type: ignore[method-assign]
    gradients(model, x)
    assert kept == [(4, 3)]


@pytest.mark.gpu
def test_inputs_are_on_the_host_until_backward() -> None:
    """Two layers of 1000 inputs each: with offloading the device holds none of them after the forward pass."""
    held = []
    for offloads in (False, True):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).cuda()
        for layer in model:
            recompute(layer, offloads=offloads)
        x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x * 1).sum()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    assert held[0] - held[1] == pytest.approx(2 * 4_000_000, rel=0.1)


def test_offloading_needs_recomputation() -> None:
    with pytest.raises(ConfigError, match="needs activation_checkpointing=True"):
        FSDPStrategy(activation_offload=True)
