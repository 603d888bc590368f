"""Each optimizer of torch trains under FSDP as in one process, or is refused before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.optimizer_limits import check_steps_parts
from loopwright.trainer.accelerator import Accelerator

Run = Callable[..., list[Any]]

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {"Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam", "SGD fused", "Adagrad fused"}


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Each optimizer with its defaults, and with each way of stepping that it has."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, kind in OPTIMIZERS.items():
        ways = [way for way in ("foreach", "fused") if way in inspect.signature(kind).parameters]
        found += [(name, {}), *((name, {way: True}) for way in ways)]
    return found


def trained(name: str, options: dict[str, Any], strategy: Any) -> Any:
    """The weights behind three steps, or why there were none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    accelerator = Accelerator(strategy=strategy)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except ConfigError as error:
        return str(error)
    for step in range(3):
        accelerator.backward(F.mse_loss(model(torch.full((3, 4), 1.0 + step)), torch.zeros(3, 4)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.tolist() for key, value in accelerator.get_state_dict(model).items()}


def train_all(cases: list[tuple[str, dict[str, Any]]], strategy: Any) -> list[Any]:
    return [trained(name, options, strategy) for name, options in cases]


def test_all_of_torchs_optimizers(two_processes: Run) -> None:
    cases = variants()
    assert len(cases) > 25
    found = two_processes(train_all, cases, "fsdp")[0]
    for (name, options), result in zip(cases, found, strict=True):
        label = " ".join([name, *options])
        if label in REFUSED or name in REFUSED:
            assert isinstance(result, str), label
            assert result.startswith(name), result
            continue
        assert isinstance(result, dict), f"{label}: {result}"
        for key, value in trained(name, options, "single").items():
            assert torch.allclose(torch.tensor(result[key]), torch.tensor(value), atol=1e-6), label


def train_beside_whole_ones() -> Any:
    """Weights behind a step with a module that stays whole, and what the optimizer is told."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(strategy=FSDPStrategy(ignored_modules=["1"]))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 4)))
    optimizer.param_groups[0]["foreach"] = None  # as a checkpoint may have it
    optimizer.step()
    together = torch.optim.AdamW(
        (again := torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))).parameters()
    )
    together.param_groups[0]["foreach"] = True
    with pytest.raises(ConfigError, match=r"AdamW\(foreach=True\) steps all parameters of a group at once"):
        Accelerator(strategy=FSDPStrategy(ignored_modules=["1"])).prepare(again, together)
    return optimizer.param_groups[0]["foreach"], accelerator.get_state_dict(model)


def test_groups_with_weights_in_parts_and_whole_ones(two_processes: Run) -> None:
    told, weights = two_processes(train_beside_whole_ones)[0]
    assert told is False
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 4)).backward()
    optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value)


def test_what_it_says() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"Adafactor computes with whole weights.*strategy='fsdp'.*AdamW"):
        check_steps_parts([torch.optim.Adafactor([weight])], "fsdp")
    with pytest.raises(ConfigError, match=r"SGD\(fused=True\) can't step parts of weights.*Leave fused out"):
        check_steps_parts([torch.optim.SGD([weight], lr=0.1, fused=True)], "fsdp")
    with pytest.raises(ConfigError, match="SparseAdam needs sparse gradients"):
        check_steps_parts([torch.optim.SparseAdam([weight])], "fsdp")
    check_steps_parts([torch.optim.AdamW([weight], fused=True), torch.optim.Adagrad([weight])], "fsdp")
