"""FSDP: models of which a part has no loss, with processes that have none either; modules that several others hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopwright.callbacks.callback import SkipBatch
from loopwright.strategies.wrapping import find_units

from .sharded import Layer, Words, fit, loader, state_of
from .test_fsdp_trainer import Gaps, LeavesOut, close

Run = Callable[..., list[Any]]


class Partial(Gaps):
    """Has a parameter that nothing uses, one without a dimension, a layer whose outputs are of no use, passes without
    gradients, and inputs of layers that have none.
    """

    def __init__(self, ways: str) -> None:
        super().__init__(ways)
        self.beside = Layer()
        self.layers[0].spare = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layers[1].factor = nn.Parameter(torch.tensor(1.0 + torch.rand(()).item()))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).detach()
        with torch.no_grad():
            self.layers(x)
        x = self.frozen(self.layers(x)) * self.layers[1].factor
        self.beside(x)
        logits: Tensor = self.head(x) * self.scale
        return logits


class LeavesLate(LeavesOut):
    """Leaves batches out before their backward as well."""

    def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        if task.ways[trainer.state.batch] == "f":
            raise SkipBatch


def _in_turns(*ways: str) -> str:
    """The batches of all processes as one process has them: those that are left out give no loss."""
    return "".join("." if way == "." else "e" for each in zip(*ways, strict=True) for way in each)


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
    (wanted,) = _partial([_in_turns("........", gaps)], 3, [{"accumulate": 4}])
    strategies: list[dict[str, Any]] = [
        {"wrap": "none"},
        {"wrap": "auto", "reshard_after_forward": False},
        {"wrap": ["Layer", "Linear"]},
        {"wrap": "Layer", "activation_checkpointing": True, "mesh": [2, 1]},
    ]
    cases = [{"accumulate": 2, "strategy": {"name": "fsdp"} | options} for options in strategies]
    for found in two_processes(_partial, ["........", gaps], 3, cases)[0]:
        close(found, wanted)


FIRST = [(".?.e....", "?......."), ("???.....", "ebf..b.l")]


@pytest.mark.parametrize("first", "elf")
def test_a_process_without_a_loss_to_begin_with(two_processes: Run, first: str) -> None:
    cases: list[dict[str, Any]] = [
        {"accumulate": 2, "strategy": {"name": "fsdp", "wrap": ["Layer", "Linear"]}},
        {"accumulate": 2, "strategy": {"name": "fsdp", "activation_checkpointing": True}},
    ]
    for pattern in FIRST:
        ways = [way.replace("?", first) for way in pattern]
        (wanted,) = _partial([_in_turns(*ways)], 3, [{"accumulate": 4}])
        for found in two_processes(_partial, ways, 3, cases)[0]:
            close(found, wanted)


class Early(Words):
    """Leaves its first batch of validation out, in some processes, and has another order of layers for each loader.

    Args:
        leaves: the processes that do.
    """

    def __init__(self, leaves: list[int]) -> None:
        super().__init__()
        self.leaves = leaves

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        is_first = self.trainer.state.stage == "sanity" and dataloader_idx == 0
        if is_first and batch_idx in self.leaves:  # of the first two batches each process has one
            return
        x = self.embedding(batch[0])
        for layer in [(1, 2, 0), (0, 1), (0, 2)][dataloader_idx]:
            x = self.layers[layer](x)
        self.log("val/mean", self.head(x).mean())


def _early(leaves: list[int], strategy: str) -> dict[str, float]:
    torch.manual_seed(1)
    val = {"a": loader(12, 3), "b": loader(9, 3), "c": loader(3, 3)}  # process 1 has none of the last two batches
    trainer = fit(Early(leaves), loader(24, 3), val, strategy=strategy)
    return trainer.metrics


@pytest.mark.parametrize("leaves", [[0], [1], [0, 1]])
def test_an_evaluation_that_leaves_out_its_first_batch(two_processes: Run, leaves: list[int]) -> None:
    found = two_processes(_early, leaves, "fsdp")
    assert found[0] == found[1]
    assert found[0] == pytest.approx(two_processes(_early, leaves, "ddp")[0], abs=1e-5)


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
