"""`Accelerator` on two processes: models, files. F: facts of semantics about Accelerate; B: cases.

What runs in the workers returns plain values; process 0's stand first in the lists that the tests compare.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.profiling import ProfileKwargs
from loopwright.checkpoint.weights import load_weights
from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.kinds import DistributedType
from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

from .several import on_cpu
from .weights import Weight

# The processes


def describe() -> Any:
    first, second = on_cpu(), on_cpu(gradient_accumulation_steps=3)
    return (
        (first.num_processes, first.process_index, first.local_process_index, str(first.device)),
        (first.is_main_process, first.is_last_process, first.use_distributed, first.multi_device),
        (first.distributed_type, first.state.process is first.process, second.num_processes),
        (first.gradient_accumulation_steps, second.gradient_accumulation_steps),
    )


def test_accelerators_share_one_group(two_processes: Any) -> None:
    assert two_processes(describe) == [
        (
            (2, index, index, "cpu"),
            (index == 0, index == 1, True, False),
            (DistributedType.MULTI_CPU, True, 2),
            (1, 3),
        )
        for index in (0, 1)
    ]


def conflicts() -> list[str]:
    texts = []
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    for options in (
        {"strategy": {"name": "ddp", "static_graph": True}, "kwargs_handlers": [handler]},
        {"strategy": "single"},
    ):
        try:
            accelerator = on_cpu(**options)
            accelerator.prepare(Weight())
        except ConfigError as error:
            texts.append(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_cpu(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=9))])
    return [*texts, *(str(warning.message) for warning in caught)]


def test_what_contradicts_itself_is_refused_and_what_comes_too_late_is_said(two_processes: Any) -> None:
    for twice, single, late in two_processes(conflicts):
        assert "has options of its own. Give them in one place" in twice
        assert "strategy='single' trains in one process, but 2 were started" in single
        assert "InitProcessGroupKwargs(timeout=0:00:09) has no effect: the processes are in a group already" in late


def triggers() -> list[bool]:
    accelerator = on_cpu()
    seen = []
    for step in range(3):
        if step == 1 and accelerator.process_index == 1:
            accelerator.set_trigger()
        seen.append(accelerator.check_trigger())
    return seen


def test_f39_a_trigger_reaches_all(two_processes: Any) -> None:
    assert two_processes(triggers) == [[False, True, False]] * 2


# Models


def reduced_gradients(**plugin: Any) -> list[float]:
    accelerator = on_cpu(gradient_accumulation_plugin=GradientAccumulationPlugin(2, **plugin))
    model = accelerator.prepare(Weight())
    inputs = torch.full((1,), accelerator.process_index + 1.0)
    seen = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
        seen.append(accelerator.unwrap_model(model).weight.grad.item())
    return seen


def reduced_each_batch() -> list[float]:
    return reduced_gradients(sync_each_batch=True)


def test_f24_gradients_are_reduced_where_they_synchronise(two_processes: Any) -> None:
    assert two_processes(reduced_gradients) == [[0.5, 1.5], [1.0, 1.5]]
    assert two_processes(reduced_each_batch) == [[0.75, 1.5]] * 2


def synced_on_request() -> float:
    accelerator = on_cpu()
    model = accelerator.prepare(Weight())
    inputs = torch.full((1,), accelerator.process_index + 1.0)
    with accelerator.no_sync(model):
        losses = [model(inputs).mean() for _ in range(2)]
        accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    value: float = accelerator.unwrap_model(model).weight.grad.item()
    return value


def test_a_backward_may_synchronise_although_its_forward_did_not(two_processes: Any) -> None:
    assert two_processes(synced_on_request) == [3.0, 3.0]


def prepared_kinds(folder: str) -> Any:
    accelerator = on_cpu(mixed_precision="bf16")
    wrapped, frozen = accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    judged = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    kept = on_cpu(device_placement=False).prepare(nn.Linear(2, 2))
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    accelerator.save_model(wrapped, folder)
    accelerator.save({"weight": plain.weight}, f"{folder}/own.safetensors", safe_serialization=True)
    accelerator.save([accelerator.process_index], f"{folder}/own.pt")
    accelerator.wait_for_everyone()
    loaded = nn.Linear(2, 2)
    load_weights(loaded, folder)
    return (
        [isinstance(model, DistributedDataParallel) for model in (wrapped, frozen, judged, kept)],
        accelerator.prepare(wrapped) is wrapped,
        type(plain).__name__,
        list(accelerator.get_state_dict(wrapped)),
        torch.equal(loaded.weight, plain.weight),
        torch.load(f"{folder}/own.pt"),
        wrapped(torch.ones(1, 2)).dtype,
    )


def test_models_are_wrapped_where_they_train_and_saved_by_the_main_process(two_processes: Any, tmp_path: Any) -> None:
    answers = two_processes(prepared_kinds, str(tmp_path))
    assert answers == [([True, False, False, True], True, "Linear", ["weight", "bias"], True, [0], torch.float32)] * 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "own.pt", "own.safetensors"]


def two_models() -> list[list[float]]:
    """The first model's input is r + 1, the second's twice that; the learning rate is 1."""
    accelerator = on_cpu(gradient_accumulation_steps=2)
    first, second = Weight(), Weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    inputs = torch.full((1,), accelerator.process_index + 1.0)
    seen = []
    for _ in range(2):
        with accelerator.accumulate(first, second):
            for model, factor in ((first, 1), (second, 2)):
                accelerator.backward(model(inputs * factor).mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        seen.append([accelerator.unwrap_model(model).weight.item() for model in (first, second)])
    return seen


def test_several_models_accumulate_together(two_processes: Any) -> None:
    assert two_processes(two_models) == [[[0.0, 0.0], [-1.5, -3.0]]] * 2


def freed() -> tuple[bool, float]:
    """What was prepared is gone, and what comes after it trains."""
    accelerator = on_cpu()
    model = Weight()
    gone = weakref.ref(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    model = accelerator.prepare(Weight())
    accelerator.backward(model(torch.ones(1)).mean())
    return gone() is None, accelerator.unwrap_model(model).weight.grad.item()


def test_free_memory_forgets_wrapped_models(two_processes: Any) -> None:
    assert two_processes(freed) == [(True, 1.0)] * 2


def trained(split: bool) -> tuple[list[float], list[float], list[float]]:
    """Two epochs; returns weights, norms and losses of all samples."""
    torch.manual_seed(1)
    inputs = torch.randn(24, 3)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    accelerator = on_cpu(
        gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(split_batches=split, data_seed=3)
    )
    model = nn.Linear(3, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), data)
    norms, losses = [], []
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    weights = torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
    return weights.tolist(), norms, losses


def test_two_processes_train_as_one_does(two_processes: Any) -> None:
    alone = trained(split=True)
    for found in two_processes(trained, True):
        for values, expected in zip(found, alone, strict=True):
            assert values == pytest.approx(expected, abs=1e-6)


def overflow_on_one() -> tuple[list[bool], list[float], float]:
    """Process 1 alone has an infinite loss in the first step."""
    accelerator = on_cpu(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = Weight()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 - step / 10)
    scheduler = accelerator.prepare(schedule)
    skipped, rates = [], []
    for step in range(2):
        factor = math.inf if step == 0 and accelerator.process_index == 1 else 1.0
        accelerator.backward(model(torch.ones(1)).mean() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    assert accelerator.scaler is not None
    return skipped, rates, accelerator.scaler.get_scale()


def test_f23_f25_an_overflow_on_one_process_skips_the_step_on_both(two_processes: Any) -> None:
    assert two_processes(overflow_on_one) == [([True, False], [1.0, 0.8], 2.0)] * 2


def searched() -> tuple[float, int]:
    """Newton-like steps with a line search on the mean of (w - 1)^2 and (w - 3)^2."""
    accelerator = on_cpu()
    model = Weight()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    model, optimizer = accelerator.prepare(model, optimizer)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(torch.ones(1)) - (1 + 2 * accelerator.process_index)).square().mean()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)
    return accelerator.unwrap_model(model).weight.item(), calls


def test_a_line_search_ends_at_one_place(two_processes: Any) -> None:
    first, second = two_processes(searched)
    assert first == second
    assert first[0] == pytest.approx(2.0, abs=1e-4)


# Files


def tracked(folder: str) -> Any:
    accelerator = on_cpu(log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": float(accelerator.process_index)}, step=1)
    tracker = accelerator.get_tracker("jsonl")
    tracker.log({"own": 1.0}, 2)
    accelerator._group.finish("success")  # not end_training: the workers go on
    return type(tracker).__name__


def test_the_main_process_alone_writes_records(two_processes: Any, tmp_path: Any) -> None:
    assert two_processes(tracked, str(tmp_path)) == ["JSONLTracker", "SilentTracker"]
    text = (tmp_path / "digits" / "metrics.jsonl").read_text()
    assert (text.count('"loss": 0.0'), text.count('"loss": 1.0'), text.count('"own"')) == (1, 0, 1)


def traced(folder: str) -> bool:
    accelerator = on_cpu(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(4).add(1)
    return any(event.key == "aten::add" for event in profiler.key_averages())


def test_each_process_writes_its_trace(two_processes: Any, tmp_path: Any) -> None:
    assert two_processes(traced, str(tmp_path)) == [True, True]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]
