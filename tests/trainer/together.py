"""A task for the tests of `auto_accumulate` under FSDP, in which memory runs out at a chosen place, and its runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import SkipBatch
from loopwright.distributed.group import rank
from loopwright.distributed.random import set_seed
from loopwright.strategies.sharded_state import groups_of
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from .tiny import trainer

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."
WIDTH, NUM_BLOCKS = 4, 3


class Spot(NamedTuple):
    """Where memory runs out.

    Args:
        block: in which unit; -1: before the first, `NUM_BLOCKS`: behind the last.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        ranks: the processes on which it does.
        most: the samples that fit.
        since: the micro-batch from which on it does.
    """

    block: int
    phase: str
    ranks: tuple[int, ...] = (0, 1, 2)
    most: int = 3
    since: int = 0

    def check(self, block: int, task: Net, values: Tensor) -> Tensor:
        """Run out of memory, or pass the values on."""
        is_here = block == self.block and rank() in self.ranks and task.trainer.state.micro_step >= self.since
        if not is_here or len(values) <= self.most or not task.training:
            return values
        is_recomputing = torch._C._current_graph_task_id() != -1
        if self.phase == ("recompute" if is_recomputing else "forward"):
            raise torch.OutOfMemoryError(TEXT)
        if self.phase == "backward":
            return _Full.apply(values)  # type: ignore[no-any-return,no-untyped-call]
        return values


class _Full(torch.autograd.Function):
    """Passes its input on, and runs out of memory in backward."""

    @staticmethod
    def forward(context: Any, data: Tensor) -> Tensor:
        return data.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(TEXT)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH + 1)
        self.outer = nn.Linear(WIDTH + 1, WIDTH)
        self.check: Callable[[Tensor], Tensor] = lambda values: values

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.check(torch.tanh(self.inner(values)))
        mixed: Tensor = values + self.outer(hidden)
        return mixed


class Net(Task):
    """Blocks in float64, of which the first is called twice.

    Args:
        spots: where memory runs out, as `Spot` has it.
        ways: of each process what it does in its batches: `.` trains, `e` gives no loss before and `l` behind the
            forward pass, `s` raises `SkipBatch`. Repeated as needed.
        returns: `"mean"` or `"pair"`.
        frozen: whether the second block is not trained.
    """

    def __init__(
        self,
        spots: Sequence[Sequence[Any]] = (),
        ways: Sequence[str] = (".",),
        returns: str = "mean",
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        set_seed(3)
        self.spots = [Spot(*each) for each in spots]
        self.ways, self.returns = ways, returns
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.double()
        for number, block in enumerate(self.blocks):
            block.check = lambda values, number=number: self.check(number, values)
        self.blocks[1].requires_grad_(not frozen)
        self.sizes: list[int] = []
        self.seen: list[float] = []

    def check(self, block: int, values: Tensor) -> Tensor:
        for spot in self.spots:
            values = spot.check(block, self, values)
        return values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ways = self.ways[rank() % len(self.ways)]
        way = ways[self.trainer.state.micro_step % len(ways)]
        (values,) = batch
        self.sizes.append(len(values))
        if way == "e":
            return None
        if way == "s":
            raise SkipBatch
        values = self.check(-1, values)
        for number in (0, 1, 0, 2):
            values = self.blocks[number](values)
        losses = self.check(NUM_BLOCKS, self.head(values)).square().flatten()
        if way == "l":
            return None
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        return (losses.sum(), len(losses)) if self.returns == "pair" else losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (values,) = batch
        for block in self.blocks:
            values = block(values)
        self.log("val", self.head(values).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def data(*sizes: Sequence[int]) -> DataLoader[Any]:
    """Batches of so many samples: for each process those of its own, as many as others have."""
    turns = [size for turn in zip(*sizes, strict=True) for size in turn]
    rows = torch.randn(sum(turns), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches = torch.arange(sum(turns)).split(turns)
    return DataLoader(TensorDataset(rows), batch_sampler=[each.tolist() for each in batches])


def run(
    task: Task, train: Any, val: Any = None, resume_from: Any = None, strategy: Any = None, **options: Any
) -> dict[str, Any]:
    """A run under FSDP. Gives whole weights, records, counters, the size of parts and what was said. Collective."""
    tracker = MemoryTracker()
    settings: dict[str, Any] = {"max_epochs": 1, "trackers": tracker, "log_every": 1, "auto_accumulate": True}
    chosen = {"name": "fsdp", "wrap": "Block"} | (strategy or {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trainer(strategy=chosen, **(settings | options))
        found.fit(task, train, val, resume_from=resume_from)
    model = found._newest("test").model
    weights = found.strategy.whole_model_state(model)
    texts = [str(each.message) for each in said]
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "records": tracker.runs[0].records if tracker.runs else [],
        "state": found.state.counters(),
        "size": found.part_size,
        "said": [text for text in texts if "auto_accumulate" in text],
        "sizes": getattr(task, "sizes", []),
        "left": [group._module_fqn for group in groups_of(model) if not group.is_sharded],
    }


def fit(
    spots: Sequence[Sequence[Any]], sizes: Sequence[Sequence[int]], net: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A run of `Net`, see `data`. Collective."""
    return run(Net(spots, **(net or {})), data(*sizes), **options)


def compare(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Whether a run gave what another one did, on the main process, which has the weights."""
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert found["state"] == wanted["state"]
    assert found["left"] == wanted["left"] == []
    assert len(found["records"]) == len(wanted["records"])
    for (step, values), (other, others) in zip(found["records"], wanted["records"], strict=True):
        assert step == other
        assert values.keys() == others.keys()
        for name, value in others.items():
            assert abs(values[name] - value) < max(tolerance, 1e-6) * 10, (step, name, values[name], value)
