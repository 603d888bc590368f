"""FSDP: models of which a part has no loss, with processes that have none either; modules that several others hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopwright.strategies.wrapping import find_units

from .sharded import Layer, fit, loader, state_of
from .test_fsdp_trainer import Gaps, LeavesOut, close

Run = Callable[..., list[Any]]


class Partial(Gaps):
    """Has a parameter that nothing uses, a layer whose outputs are of no use, passes without gradients, and inputs of
    layers that have none.
    """

    def __init__(self, ways: str) -> None:
        super().__init__(ways)
        self.beside = Layer()
        self.layers[0].spare = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).detach()
        with torch.no_grad():
            self.layers(x)
        x = self.frozen(self.layers(x))
        self.beside(x)
        logits: Tensor = self.head(x) * self.scale
        return logits


class LeavesLate(LeavesOut):
    """Leaves batches out before their backward as well."""

    def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        if task.ways[trainer.state.batch] == "f":
            super().on_batch_start(trainer, task, None, task.ways.index("b"))


def _partial(ways: list[str], batch_size: int, cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    index = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for options in cases:
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch's, of units that are one Linear
            trainer = fit(Partial(ways[index]), loader(48, batch_size), callbacks=[LeavesLate()], **options)
        found.append(state_of(trainer))
    return found


def test_what_no_loss_reaches_in_batches_without_one(two_processes: Run) -> None:
    gaps = ".flesb.f"
    (wanted,) = _partial(["".join(f".{way if way == '.' else 'e'}" for way in gaps)], 3, [{"accumulate": 4}])
    strategies: list[dict[str, Any]] = [
        {"wrap": "none"},
        {"wrap": "auto", "reshard_after_forward": False},
        {"wrap": ["Layer", "Linear"]},
        {"wrap": "Layer", "activation_checkpointing": True, "mesh": [2, 1]},
    ]
    cases = [{"accumulate": 2, "strategy": {"name": "fsdp"} | options} for options in strategies]
    for found in two_processes(_partial, ["........", gaps], 3, cases)[0]:
        close(found, wanted)


class Holder(nn.Module):
    """A layer with one of its own, and one that others hold too."""

    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.common = common

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.common(self.own(x))
        return outputs


def test_units_that_hold_the_same_module() -> None:
    common = nn.Conv1d(4, 4, 1)
    model = nn.Sequential(Holder(common), Holder(common))
    known = {module: name for name, module in model.named_modules()}

    def names(policy: Any) -> list[str]:
        return [known[unit] for unit in find_units(model, policy)]

    # The common module belongs to what holds both, unless it is a unit itself: then it comes before all that hold it.
    assert names("Holder") == []
    assert names(["Holder", "Linear"]) == ["1.own", "0.own"]
    assert names(["Holder", "Conv1d"]) == ["0.common", "1", "0"]
    assert names(20) == ["0.common", "1.own", "0.own"]
    assert names(21) == []
