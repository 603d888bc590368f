"""Handlers of keyword arguments."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
)
from loopwright.strategies.precision import Autocast, FullPrecision, MixedPrecision, ScaledPrecision
from loopwright.trainer.accelerator import Accelerator


def test_only_what_differs_from_the_defaults_is_handed_on() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=1024.0, growth_interval=2000).to_kwargs() == {"init_scale": 1024.0}
    assert AutocastKwargs(cache_enabled=True).to_kwargs() == {"cache_enabled": True}
    assert DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs() == {"find_unused_parameters": True}
    hooked = DistributedDataParallelKwargs(bucket_cap_mb=5, comm_hook="power_sgd", comm_wrapper="bf16")
    assert hooked.to_kwargs() == {"bucket_cap_mb": 5}
    assert hooked.to_dict()["comm_hook"] == "power_sgd"
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}


def test_a_handler_is_found_by_its_class() -> None:
    given = GradScalerKwargs(init_scale=2.0)
    handlers = Handlers([given])
    assert handlers.get(GradScalerKwargs) is given
    assert handlers.get(AutocastKwargs) == AutocastKwargs()


def test_the_scaler_is_made_as_its_handler_says() -> None:
    handler = GradScalerKwargs(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    scaler = Accelerator(mixed_precision="fp16", kwargs_handlers=[handler]).scaler
    assert scaler is not None
    found = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert found == (8.0, 4.0, 0.25, 7)
    assert Accelerator(mixed_precision="bf16", kwargs_handlers=[handler]).scaler is None


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    assert (accelerator.scaler, accelerator.mixed_precision) == (None, "fp16")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    accelerator.backward((2 * parameter).sum())
    assert accelerator.clip_grad_norm_([parameter], 10.0).item() == 2
    optimizer.step()
    assert parameter.item() == -2


def test_contexts_of_forward_passes() -> None:
    precision = MixedPrecision(torch.device("cpu"))
    assert precision.contexts(AutocastKwargs(False, False)) == Autocast("cpu", torch.bfloat16, False, False)
    assert precision.contexts(AutocastKwargs()) == Autocast("cpu", torch.bfloat16)
    full = FullPrecision()
    assert full.contexts(AutocastKwargs(False)) == full.autocast


def test_a_precision_says_its_word_and_its_scaler() -> None:
    cpu = torch.device("cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    precisions = [FullPrecision(), MixedPrecision(cpu), MixedPrecision(cpu, "fp16"), ScaledPrecision(cpu, scaler)]
    assert [p.name for p in precisions] == ["no", "bf16", "fp16", "fp16"]
    assert [p.scaler for p in precisions] == [None, None, None, scaler]
    assert [Accelerator(mixed_precision=p).mixed_precision for p in precisions] == ["no", "bf16", "fp16", "fp16"]


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True])
def test_a_plugin_has_at_least_one_step(value: object) -> None:
    with pytest.raises(ValueError, match=rf"GradientAccumulationPlugin\.num_steps={value}\. Expected an integer >= 1"):
        GradientAccumulationPlugin(num_steps=value)  # type: ignore[arg-type]
