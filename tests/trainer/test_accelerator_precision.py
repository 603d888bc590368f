"""Forward passes in mixed precision. F: facts of semantics about Accelerate; B: cases."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.strategies.handlers import AutocastKwargs
from loopwright.trainer.accelerator import Accelerator

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Probe(nn.Module):
    """A linear layer that says in which format it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: torch.dtype | None = None

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        """A mapping of what the layer gives, and of other things."""
        hidden = self.linear(inputs) * scale
        self.seen = hidden.dtype
        return {"hidden": hidden, "pair": (hidden, [None, "text", torch.arange(2)])}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_f30_the_inside_is_half_and_the_outside_is_full(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    model = Probe()
    prepared = accelerator.prepare(model)
    outputs = prepared(torch.ones(1, 2), scale=2.0)
    assert prepared is model
    assert model.seen is HALF[precision]
    assert model.linear.weight.dtype is torch.float32
    assert (outputs["hidden"].dtype, outputs["pair"][0].dtype) == (torch.float32, torch.float32)
    assert outputs["pair"][1][:2] == [None, "text"]
    assert outputs["pair"][1][2].dtype is torch.int64
    assert (accelerator.scaler is None) == (precision == "bf16")


def test_without_mixed_precision_the_forward_is_not_touched() -> None:
    model = Accelerator().prepare(Probe())
    model(torch.ones(1, 2))
    assert model.seen is torch.float32
    assert "forward" not in vars(model)


def test_f30_autocast_can_be_switched_off() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    layer = nn.Linear(2, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(torch.ones(1, 2)).dtype is torch.float32
    with accelerator.autocast(AutocastKwargs(cache_enabled=False)):
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


def test_a_handler_sets_the_default() -> None:
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Probe())
    model(torch.ones(1, 2))
    assert model.seen is torch.float32
    with accelerator.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_autocast_without_mixed_precision_does_nothing() -> None:
    with Accelerator().autocast(), Accelerator().autocast(AutocastKwargs()):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_the_forward_keeps_its_signature_and_can_be_had_back() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(Probe())
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "scale"]
    assert model.forward.__doc__ is not None
    assert accelerator.unwrap_model(model) is model
    assert "forward" in vars(model)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)
    model(torch.ones(1, 2))
    assert model.seen is torch.float32


def test_a_forward_of_the_instance_itself_is_used_and_put_back() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = nn.Linear(2, 2)
    calls: list[torch.dtype] = []

    def forward(inputs: Tensor) -> Tensor:
        calls.append(nn.functional.linear(inputs, model.weight).dtype)
        return inputs

    model.forward = forward  # type: ignore[method-assign]
    accelerator.prepare(model)(torch.ones(1, 2))
    assert calls == [torch.bfloat16]
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert model.forward is forward


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_b116_a_copy_runs_its_own_weights(duplicate: Any) -> None:
    """Also in the middle of an fp16 step, when the scaler itself can't be copied."""
    accelerator = Accelerator(mixed_precision="fp16")
    model = Probe()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2))["hidden"].sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    twin = duplicate(model)
    for parameter in twin.parameters():
        parameter.data.zero_()
    before = model(torch.ones(1, 2))["hidden"]
    assert twin(torch.ones(1, 2))["hidden"].tolist() == [[0, 0]]
    assert twin.seen is torch.float16
    assert torch.equal(model(torch.ones(1, 2))["hidden"], before)
    assert before.abs().min() > 0
    accelerator.unwrap_model(twin, keep_fp32_wrapper=False)
    twin(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert (twin.seen, model.seen) == (torch.float32, torch.float16)


def gradients(accelerator: Accelerator, *, looks_first: bool) -> list[Tensor]:
    """The gradients of one step, with or without a forward pass before it that keeps no graph."""
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    inputs = torch.randn(8, 4)
    with accelerator.autocast():
        if looks_first:
            with torch.no_grad():
                model(inputs)
        loss = model(inputs).pow(2).mean()
    accelerator.backward(loss)
    return [parameter.grad for parameter in model.parameters()]


def test_b107_a_forward_without_gradients_does_not_take_those_of_the_next() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    expected = gradients(accelerator, looks_first=False)
    found = gradients(accelerator, looks_first=True)
    assert all(gradient is not None for gradient in found)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=0)
    with accelerator.autocast():
        assert torch.is_autocast_cache_enabled()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_prepared_model_can_be_compiled() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
