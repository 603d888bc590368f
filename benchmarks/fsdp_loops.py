"""The same training with each process holding a part of the weights: by hand with `fully_shard`, and in Loopwright."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from own_loops import BenchmarkTask, fit, run_accelerator
from ticks import Ticker
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from workloads import VOCABULARY, Workload

# mypy: disable-error-code="no-untyped-call"


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, sequence, width), as the input."""
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        outputs: Tensor = x + self.outer(F.gelu(self.inner(self.norms[1](x))))
        return outputs


class Blocks(nn.Module):
    """A model of bytes whose weights are in its layers.

    Args:
        width: of each layer.
        num_layers: how many there are.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, vocabulary, sequence) of tokens (batch, sequence)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits.transpose(1, 2).contiguous()  # fully_shard warns of views


def run_hand_written(work: Workload, ticker: Ticker, steps: int) -> None:
    """What a user would write: each layer and then the model a unit, and gradients reduced in a window's last batch."""
    model, _, loader = work.build(steps * dist.get_world_size())
    sampler = DistributedSampler(loader.dataset, shuffle=work.shuffle)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(loader.dataset, batch_size=work.batch_size, sampler=sampler)
    mesh: Any = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    optimizer = work.optimizer(model)
    loss_function, accumulate = work.loss, work.accumulate
    for index, (x, y) in enumerate(loader, start=1):
        ticker.tick()
        closes = index % accumulate == 0
        if accumulate > 1:
            sharded.set_requires_gradient_sync(closes)
        (loss_function(sharded(x), y) / accumulate).backward()
        if closes:
            optimizer.step()
            optimizer.zero_grad()


def run_trainer_fsdp(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers."""
    _fit_on_all(BenchmarkTask(work, ticker), steps)


def run_trainer_fsdp_log(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers, with `self.log` in each step."""
    _fit_on_all(BenchmarkTask(work, ticker, {}), steps)


def run_accelerator_fsdp(work: Workload, ticker: Ticker, steps: int) -> None:
    """Loopwright's Accelerator in the user's own loop."""
    run_accelerator(work, ticker, steps * dist.get_world_size(), strategy="fsdp")


def _fit_on_all(task: BenchmarkTask, steps: int) -> None:
    fit(task, steps * dist.get_world_size(), strategy="fsdp", progress=False, trackers=False)
