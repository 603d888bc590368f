"""DeepSpeed under the Accelerator: two processes against one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loopwright import Accelerator, DeepSpeedPlugin
from loopwright.distributed.errors import CheckpointError, ConfigError, ShapeMismatchError
from loopwright.utils import DummyOptim, DummyScheduler

from .test_deepspeed_trainer import close, index, stage

Run = Callable[..., list[Any]]
CLIP_NORM = 0.2


def build(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(batch_size: int) -> DataLoader[Any]:
    data: Any = torch.randn(48, 7, generator=torch.Generator().manual_seed(2))
    return DataLoader(data, batch_size=batch_size)


def objects(batch_size: int) -> tuple[Any, Any, Any, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # so that it has a state already when it is prepared
    optimizer.zero_grad()
    return model, optimizer, rows(batch_size), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, clips: bool = True) -> Any:
    """What a user's loop gives: losses, norms before clipping, and rates."""
    losses, norms, rates = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(batch[:, :4]), batch[:, 4:])
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            accelerator.backward(loss)
            if accelerator.sync_gradients and clips:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
    return losses, norms, rates


def _script(batch_size: int, strategies: list[Any]) -> Any:
    found = []
    for strategy in strategies:
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=3, strategy=strategy, scale_scheduler_by_processes=False
        )
        model = build()
        prepared = accelerator.prepare(*objects(batch_size))
        numbers = steps(accelerator, *prepared)
        state = {name: value.clone() for name, value in accelerator.get_state_dict(prepared[0]).items()}
        assert type(accelerator.unwrap_model(prepared[0])) is type(model)
        found.append((*numbers, state, str(accelerator.distributed_type)))
        accelerator.free_memory()
    return found


def test_a_users_loop(two_processes: Run) -> None:
    losses, norms, rates, weights, _ = _script(8, ["single"])[0]
    assert len(norms) == 2
    assert max(norms) > CLIP_NORM
    strategies = [stage(0), stage(1), stage(2), stage(3), stage(3, offload_optimizer="cpu")]
    for found in two_processes(_script, 4, strategies)[0]:
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == pytest.approx(norms, abs=1e-5)
        assert found[2] == pytest.approx(rates)
        close(found[3], weights)
        assert found[4] == "DEEPSPEED"


def _in_halves(strategy: Any, folder: str) -> Any:
    options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 3, "scale_scheduler_by_processes": False}
    first = Accelerator(strategy=strategy, **options)
    model, optimizer, loader, scheduler = first.prepare(*objects(4))
    steps(first, model, optimizer, loader, scheduler)
    first.save_state(f"{folder}/state")
    rest = steps(first, model, optimizer, loader, scheduler), first.get_state_dict(model)
    second = Accelerator(strategy=dict(strategy), **options)
    again = second.prepare(*objects(4))
    second.load_state(f"{folder}/state")
    found = steps(second, *again), second.get_state_dict(again[0])
    second.save_model(again[0], f"{folder}/model")
    with second.accumulate(again[0]):
        second.backward(again[0](torch.ones(2, 4)).sum())
    with pytest.raises(CheckpointError, match=r"a window is open .1 of 3 micro-batches"):
        second.save_state(f"{folder}/open")
    return rest, found


@pytest.mark.parametrize("number", [1, 3])
def test_a_saved_state_is_exact(two_processes: Run, tmp_path: Path, number: int) -> None:
    (rest, found), _ = two_processes(_in_halves, stage(number), str(tmp_path))
    assert found[0] == rest[0]
    for name, value in rest[1].items():
        assert torch.equal(found[1][name], value), name
    close(load_file(tmp_path / "model" / "model.safetensors"), rest[1], 0)


CONFIG = {
    "zero_optimization": {"stage": 2},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear",
        },
    },
}  # fmt: skip


def _with_dummies(path: str) -> Any:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=path))
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)
    prepared = accelerator.prepare(model, optimizer, rows(4), scheduler)
    found = steps(accelerator, *prepared, clips=False)
    return found, prepared[3].state_dict()["last_batch_iteration"], accelerator.get_state_dict(prepared[0])


def test_deepspeeds_own_optimizer_and_schedule(two_processes: Run, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    ((losses, _, rates), iteration, weights), _ = two_processes(_with_dummies, str(tmp_path / "ds.json"))
    # `rates` are those after each step: the first step has the schedule's first value, the others the one before.
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = []
    for batch, rate in zip(rows(8), [0.0, *rates], strict=False):
        optimizer.param_groups[0]["lr"] = rate
        loss = F.mse_loss(model(batch[:, :4]), batch[:, 4:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # what "auto" is under Accelerate
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert rates[:5] == pytest.approx([0.0, 0.0125, 0.025, 0.0375, 0.05])
    assert iteration == 5
    assert losses == pytest.approx(found, abs=1e-5)
    close(weights, {name: value.detach() for name, value in model.state_dict().items()})


def _in_16_bits(folder: str) -> Any:
    found = []
    for asks in (False, True):
        plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False, zero3_save_16bit_model=asks)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin)
        model, optimizer, loader, scheduler = accelerator.prepare(*objects(4))
        steps(accelerator, model, optimizer, loader, scheduler, clips=False)
        accelerator.save_model(model, f"{folder}/{asks}")
        found.append(next(model.parameters()).dtype)
        accelerator.free_memory()
    return found


def test_weights_in_16_bits_are_saved_in_32_or_16(two_processes: Run, tmp_path: Path) -> None:
    assert two_processes(_in_16_bits, str(tmp_path))[0] == [torch.bfloat16] * 2
    wide, half = (load_file(tmp_path / str(asks) / "model.safetensors") for asks in (False, True))
    close(half, {name: value.to(torch.bfloat16) for name, value in wide.items()}, 0)
    assert wide["0.weight"].dtype == torch.float32
    assert not torch.equal(wide["0.weight"], half["0.weight"].float())  # the copies have more digits


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))


def _warmed(batch_size: int, strategy: Any) -> Any:
    """With an optimizer that DeepSpeed makes anew, whose rate the schedule has changed before."""
    accelerator = Accelerator(cpu=True, strategy=strategy, scale_scheduler_by_processes=False)
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    numbers = steps(accelerator, *accelerator.prepare(model, optimizer, rows(batch_size), schedule))
    accelerator.free_memory()
    return numbers


def test_a_schedule_whose_first_rate_is_another(two_processes: Run) -> None:
    losses, _, rates = _warmed(8, "single")
    found = two_processes(_warmed, 4, stage(2))[0]
    assert found[0] == pytest.approx(losses, abs=1e-5)
    assert found[2] == pytest.approx(rates)


def _refuse() -> None:
    accelerator = Accelerator(cpu=True, strategy=stage(2))
    with pytest.raises(ConfigError, match="Sequential was set up without its optimizer"):
        accelerator.prepare(build())
    model, optimizer, *_ = accelerator.prepare(*objects(4))
    other = build()
    with pytest.raises(ConfigError, match="Sequential is a second model"):
        accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    loss: Tensor = model(torch.ones(2, 4)).sum()
    with pytest.raises(ConfigError, match="DeepSpeed takes retain_graph alone"):
        accelerator.backward(loss, create_graph=True)
    with pytest.raises(ConfigError, match=r"AdamW.step.. without a backward before it"):
        optimizer.step()
    accelerator.backward(loss)
    with pytest.raises(ConfigError, match="backward was called twice in the last micro-batch"):
        accelerator.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(ConfigError, match="3 of 4 parameters were left out"):
        accelerator.clip_grad_norm_([next(model.parameters())], 1.0)
    with pytest.raises(ConfigError, match="norms of type 2 alone"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    optimizer.step()
    accelerator.free_memory()
    with pytest.raises(ConfigError, match="has 2 optimizers, and strategy='deepspeed' steps one"):
        second = Accelerator(cpu=True, strategy=stage(2))
        parts = build()
        halves = [torch.optim.SGD(parts[i].parameters(), lr=0.1) for i in (0, 2)]
        second.prepare(parts, *halves)
    with pytest.raises(ConfigError, match="SGD holds 4 parameters that Sequential does not have"):
        own, model = build(), build()
        second.strategy.setup(model, [torch.optim.SGD(own.parameters(), lr=0.1)])
    for broken, kind, text in (
        (Scaled(), torch.optim.SGD, "parameter scale of Scaled is a scalar"),
        (nn.Linear(2, 2, bias=False, device="meta"), torch.optim.SGD, "parameter weight of Linear has no values"),
        (nn.Linear(2, 2, bias=False), torch.optim.Muon, "Muon computes with whole matrices"),
    ):
        with pytest.raises(ConfigError, match=text):
            Accelerator(cpu=True, strategy=stage(2)).prepare(broken, kind(broken.parameters(), lr=0.1))
    for config, text in (
        ({"zero_optimization": {"stage": 2, "bucket": 5}}, "(?s)DeepSpeed refuses its config: .*bucket"),
        ({"optimizer": {"type": "Foo"}}, "has a type 'Foo' of optimizer"),
        ({"optimizer": {"type": "SGD"}, "scheduler": {"type": "Foo"}}, "has a type 'Foo' of scheduler"),
    ):
        with pytest.raises(ConfigError, match=text):
            broken = build()
            is_own = "optimizer" not in config
            kept: Any = torch.optim.SGD(broken.parameters()) if is_own else DummyOptim(broken.parameters())
            DummyScheduler(kept) if "scheduler" in config else None
            Accelerator(cpu=True, strategy=stage(2, config=config)).prepare(broken, kept)
    with pytest.raises(
        ShapeMismatchError, match=r"(?s)process 0: SGD, groups of \[4\].*process 1: SGD, groups of \[1, 1"
    ):
        torn = build()
        groups: Any = [{"params": [p]} for p in torn.parameters()] if index() else torn.parameters()
        Accelerator(cpu=True, strategy=stage(2)).prepare(torn, torch.optim.SGD(groups))
    dummy = build()
    third = Accelerator(cpu=True, strategy=stage(2))
    with pytest.raises(ConfigError, match="DummyOptim stands for an optimizer of DeepSpeed's config, which has none"):
        third.prepare(dummy, DummyOptim(dummy.parameters()))


def test_what_it_cannot_serve(two_processes: Run) -> None:
    two_processes(_refuse)
