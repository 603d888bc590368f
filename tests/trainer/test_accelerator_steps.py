"""Accumulation, the optimizer step, clipping. F: facts of semantics about Accelerate; B: cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import GradScalerKwargs
from loopwright.trainer.accelerator import Accelerator

from .weights import Weight, ones, parts, syncs, train


def test_f19_a_short_last_window_is_divided_by_the_number_of_steps() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    prepared = accelerator.prepare(*parts(6))
    weights = [weight for _, weight in train(accelerator, *prepared)]
    assert weights == [0, 0, 0, -1, -1, -1.5]


def test_f19_a_short_last_window_is_exact_on_request() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, exact_last_window=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    prepared = accelerator.prepare(*parts(6))
    assert train(accelerator, *prepared)[-3:] == [(True, -1), (False, -1), (True, -2)]
    assert train(accelerator, *prepared)[-1] == (True, -4)


def test_exact_last_window_of_a_pass_shorter_than_a_window() -> None:
    plugin = GradientAccumulationPlugin(num_steps=8, exact_last_window=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    prepared = accelerator.prepare(*parts(5))
    assert train(accelerator, *prepared)[-1] == (True, -1)


def test_exact_last_window_follows_a_change_of_the_number() -> None:
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(exact_last_window=True))
    model, optimizer, loader = accelerator.prepare(*parts(6))
    accelerator.gradient_accumulation_steps = 4
    assert [w for _, w in train(accelerator, model, optimizer, loader)] == [0, 0, 0, -1, -1, -2]


def test_exact_last_window_stays_open_where_the_loaders_end_closes_nothing() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False, exact_last_window=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    prepared = accelerator.prepare(*parts(6))
    assert [w for _, w in train(accelerator, *prepared)] == [0, 0, 0, -1, -1, -1]
    assert [w for _, w in train(accelerator, *prepared)] == [-1, -2, -2, -2, -2, -3]


@pytest.mark.parametrize(
    ("steps", "batches", "expected"),
    [(2, 5, "FTFTT"), (4, 3, "FFT"), (4, 4, "FFFT"), (4, 6, "FFFTFT"), (1, 3, "TTT"), (3, 1, "T")],
)
def test_f20_gradients_synchronise_at_full_windows_and_at_the_loaders_end(
    steps: int, batches: int, expected: str
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    loader = accelerator.prepare(ones(batches))
    assert [syncs(accelerator, loader), syncs(accelerator, loader)] == [expected, expected]
    assert accelerator.gradient_state.micro_steps == 0


def test_f20_a_window_goes_on_over_passes() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(ones(5))
    assert [syncs(accelerator, loader), syncs(accelerator, loader)] == ["FTFTF", "TFTFT"]


def test_f20_without_a_loader_and_before_the_first_micro_batch() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    assert accelerator.sync_gradients
    assert syncs(accelerator, range(7)) == "FFTFFTF"


def test_the_number_of_steps_may_change_at_any_time() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*parts(4))
    accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_accumulation_steps == 2
    assert train(accelerator, model, optimizer, loader) == [(False, 0), (True, -1), (False, -1), (True, -2)]
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=0\. Expected an integer >= 1\."):
        accelerator.gradient_accumulation_steps = 0


def test_b04_an_evaluation_inside_training_changes_nothing_for_the_outer_loader() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*parts(5))
    evaluation = accelerator.prepare(ones(5))
    flags, steps = [], 0
    for index, (inputs,) in enumerate(loader):
        if index % 2 == 1:
            assert [accelerator.gradient_state.end_of_dataloader for _ in evaluation] == [False] * 4 + [True]
        flags.append(accelerator.gradient_state.end_of_dataloader)
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    assert flags == [False] * 4 + [True]
    assert steps == 2
    assert model.weight.item() == -1.25


@pytest.mark.parametrize("ends_by", ["break", "error"])
def test_f16_a_loop_that_was_left_early_leaves_no_loader_active(ends_by: str) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(ones(3))

    def leave() -> None:
        for _ in loader:
            assert accelerator.gradient_state.active_dataloader is loader
            if ends_by == "break":
                break
            raise LookupError("out")

    if ends_by == "break":
        leave()
    else:
        with pytest.raises(LookupError, match="out"):
            leave()
    state = accelerator.gradient_state
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


def test_b04_a_broken_evaluation_leaves_the_outer_loader_on_top() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, evaluation = accelerator.prepare(ones(4), ones(4))
    seen = ""
    for _ in loader:
        for _ in evaluation:
            break
        assert accelerator.gradient_state.active_dataloader is loader
        with accelerator.accumulate():
            seen += "T" if accelerator.sync_gradients else "F"
    assert seen == "FTFT"


def test_f25_nothing_is_stepped_or_forgotten_while_gradients_accumulate() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*parts(1)[:2])
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert (model.weight.item(), model.weight.grad.item()) == (0, 0.5)


def overflowing(accelerator: Accelerator, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> Any:
    """A model with the weights (1, 1) and its optimizer, prepared."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return accelerator.prepare(model, optimizer_class(model.parameters(), **options))


def test_f25_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model, optimizer = overflowing(accelerator, torch.optim.SGD, lr=0.5)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 4

    model.weight.sum().mul(math.inf).backward()
    accelerator.scaler.scale(torch.zeros(()))  # as `backward` would: a scaler begins with its first loss
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert (model.weight.tolist(), accelerator.scaler.get_scale()) == ([[1, 1]], 2)

    optimizer.zero_grad()
    accelerator.backward(model.weight.sum())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert model.weight.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("fused", [False, True])
def test_b13_a_skipped_step_is_noticed_with_a_fused_optimizer(fused: bool) -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer = overflowing(accelerator, torch.optim.AdamW, lr=0.1, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 - step / 10)
    scheduler = accelerator.prepare(schedule)
    accelerator.backward(model.weight.sum() * math.inf)
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler is not None
    assert (model.weight.tolist(), accelerator.scaler.get_scale()) == ([[1, 1]], 32768)
    assert scheduler.get_last_lr() == [0.1]

    optimizer.zero_grad()
    accelerator.backward(model.weight.sum())
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [pytest.approx(0.09)]


def three_and_four(accelerator: Accelerator) -> tuple[nn.Parameter, Any]:
    """A parameter of zeros whose gradient, after backward, is (3, 4), and its optimizer with the learning rate 1."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    accelerator.backward((parameter * torch.tensor([3.0, 4.0])).sum())
    return parameter, optimizer


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_b53_clipping_acts_on_unscaled_gradients(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    parameter, optimizer = three_and_four(accelerator)
    norm = accelerator.clip_grad_norm_([parameter], 1.0)
    optimizer.step()
    assert norm.item() == 5
    torch.testing.assert_close(parameter.data, torch.tensor([-0.6, -0.8]))


def test_clipping_twice_unscales_once() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    parameter, _ = three_and_four(accelerator)
    assert accelerator.clip_grad_norm_([parameter], 10.0).item() == 5
    accelerator.unscale_gradients()
    assert accelerator.clip_grad_norm_(parameter, 10.0, norm_type=math.inf).item() == 4


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_by_value(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    parameter, optimizer = three_and_four(accelerator)
    accelerator.clip_grad_value_([parameter], 3.5)
    optimizer.step()
    assert parameter.tolist() == [-3, -3.5]


def test_f26b_clip_gives_the_norm_before_it() -> None:
    accelerator = Accelerator()
    model = nn.Linear(5, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 30.0)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(73.4847, abs=1e-4)  # 30 * sqrt(6)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert gradients.norm().item() == pytest.approx(1.0, abs=1e-4)


def test_clip_without_gradients_gives_zero() -> None:
    assert Accelerator().clip_grad_norm_(Weight().parameters(), 1.0).item() == 0


def test_scaled_gradients_can_not_be_clipped_inside_a_window() -> None:
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model, _ = accelerator.prepare(*parts(1)[:2])
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        with pytest.raises(
            ConfigError, match=r"can't be unscaled or clipped .* Do it inside `if accelerator\.sync_gra"
        ):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_two_models_in_fp16_each_clip_their_own_gradients() -> None:
    """While the first one is clipped, the second has no gradient yet; its own is unscaled when it comes."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    first, first_optimizer = accelerator.prepare(*parts(1)[:2])
    second, second_optimizer = accelerator.prepare(*parts(1)[:2])
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        accelerator.backward(model(torch.full((1,), 2.0)).mean())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 2
        optimizer.step()
        optimizer.zero_grad()
    assert first.weight.item() == second.weight.item() == pytest.approx(-1, abs=1e-5)


def test_unscaling_all_leaves_those_without_gradients_alone() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    first, _ = accelerator.prepare(*parts(1)[:2])
    second, second_optimizer = accelerator.prepare(*parts(1)[:2])
    accelerator.backward(first(torch.ones(1)).mean())
    accelerator.unscale_gradients()
    accelerator.backward(second(torch.ones(1)).mean())
    accelerator.unscale_gradients(second_optimizer)
    assert (first.weight.grad.item(), second.weight.grad.item()) == (1, 1)


def test_f26_a_second_accelerator_leaves_the_first_alone() -> None:
    first = Accelerator(gradient_accumulation_steps=4)
    second = Accelerator()
    third = Accelerator(gradient_accumulation_steps=8, mixed_precision="bf16")
    assert [a.gradient_accumulation_steps for a in (first, second, third)] == [4, 1, 8]
    assert [a.mixed_precision for a in (first, second, third)] == ["no", "no", "bf16"]
    loader = first.prepare(ones(2))
    for _ in loader:
        assert (first.gradient_state.in_dataloader, second.gradient_state.in_dataloader) == (True, False)


def test_backward_divides_also_outside_of_accumulate() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, _ = accelerator.prepare(*parts(1)[:2])
    accelerator.backward(model(torch.ones(1)).mean())
    assert model.weight.grad.item() == 0.25


def test_backward_takes_what_torch_takes_and_no_number() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Weight())
    loss = model(torch.ones(1)).mean()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.weight.grad.item() == 2
    with pytest.raises(ConfigError, match=r"backward got a float\. Expected the loss as a tensor with a gradient\."):
        accelerator.backward(0.5)  # type: ignore[arg-type]


def test_sync_each_batch_and_no_sync_change_nothing_in_one_process() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    prepared = accelerator.prepare(*parts(4))
    with accelerator.no_sync(prepared[0]):
        assert train(accelerator, *prepared) == [(False, 0), (True, -1), (False, -1), (True, -2)]
