"""`GatedOptimizer`, where `Accelerator` shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.optimizer import GatedOptimizer
from loopwright.trainer.accelerator import Accelerator


def test_groups_state_and_defaults_are_the_wrapped_optimizers() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    outer = Accelerator().prepare(inner)
    outer.param_groups[0]["lr"] = 0.5
    outer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 1.0]
    assert outer.defaults is inner.defaults
    parameter.grad = torch.ones(1)
    outer.step()
    assert outer.state is inner.state
    assert list(inner.state) == [parameter]
    outer.load_state_dict(outer.state_dict())
    assert outer.param_groups is inner.param_groups
    assert isinstance(outer, torch.optim.Optimizer)
    assert repr(outer).startswith("GatedOptimizer(SGD")


def test_hooks_are_called_once_per_step() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = Accelerator().prepare(torch.optim.SGD([parameter], lr=1.0))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == ["before", "after", "before"]


def test_an_optimizer_that_wants_a_closure() -> None:
    """LBFGS on (p - 3)^2 is at its minimum after one step of several evaluations."""
    accelerator = Accelerator()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = accelerator.prepare(torch.optim.LBFGS([parameter], line_search_fn="strong_wolfe"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter - 3).pow(2).sum()
        accelerator.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 9
    assert parameter.item() == pytest.approx(3, abs=1e-4)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("arguments", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "fp16"}])
def test_a_closure_can_be_neither_accumulated_nor_scaled(arguments: dict[str, Any]) -> None:
    optimizer = Accelerator(**arguments).prepare(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(ConfigError, match=r"optimizer\.step\(closure\) was called, which neither accumulation nor"):
        optimizer.step(lambda: torch.zeros(()))


class Modes(torch.optim.SGD):
    """An optimizer with modes, as the schedule-free ones have."""

    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def test_modes_are_passed_on_and_zero_grad_says_what_it_does_not_know() -> None:
    inner = Modes([nn.Parameter(torch.zeros(1))], lr=1.0)
    outer = Accelerator().prepare(inner)
    outer.train()
    assert inner.mode == "train"
    outer.eval()
    assert inner.mode == "eval"
    outer.zero_grad()
    with pytest.raises(ConfigError, match=r"Modes\.zero_grad does not take set_to_none=False"):
        outer.zero_grad(set_to_none=False)


def test_an_optimizer_without_modes_ignores_them() -> None:
    outer = Accelerator().prepare(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    assert isinstance(outer, GatedOptimizer)
    outer.train()
    outer.eval()
