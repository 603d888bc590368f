"""A causal transformer with fewer heads of keys than of queries, for the tests of sequences in parts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright.trainer.task import Task

from .sharded import Records, fit, state_of

WIDTH, WORDS, LENGTH = 16, 13, 8
PLAN = {"layers.*.query": "colwise", "layers.*.key": "colwise", "layers.*.value": "colwise", "layers.*.out": "rowwise"}


class Layer(nn.Module):
    def __init__(self, num_heads: int, num_key_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width, self.dropout = WIDTH // num_heads, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, num_key_heads * self.head_width) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        heads = (
            each(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True, dropout_p=self.dropout)
        gated: Tensor = hidden + F.gelu(self.out(mixed.transpose(1, 2).flatten(2)))
        return gated


class Attends(Task):
    """Predicts the next word by all that came before. Words of 0 don't count."""

    def __init__(self, num_heads: int = 4, num_key_heads: int = 2, num_layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer(num_heads, num_key_heads) for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(words) + self.places(places)))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(inputs, places)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        buffers = prepared(batch[0])
        with self.cut(buffers):
            loss, count = self.loss(*buffers)
        self.log("loss", (loss, count), on_step=True)
        return loss, count

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(*prepared(batch[0])))
        buffers = prepared(batch[0])
        with self.cut(buffers):
            self.log("val/parts", self.loss(*buffers))

    def cut(self, buffers: list[Tensor]) -> AbstractContextManager[None]:
        accelerator: Any = self.trainer.accelerator
        if not dist.is_initialized():
            return nullcontext()
        context: AbstractContextManager[None] = accelerator.maybe_context_parallel(buffers, [1, 1, 1], {*buffers})
        return context

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def prepared(words: Tensor) -> list[Tensor]:
    """Inputs, targets and positions, of shape (batch, `LENGTH`), which share no memory."""
    places = torch.arange(LENGTH).expand(len(words), LENGTH).contiguous()
    return [words[:, :-1].clone(), words[:, 1:].clone(), places]


def words(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(WORDS, (count, LENGTH + 1), generator=generator)
    found[:, -3:] *= torch.arange(count).remainder(3).bool()[:, None]
    return TensorDataset(found)


def train(batch_size: int, options: dict[str, Any], resume_from: str | None = None, **sizes: Any) -> Any:
    """Losses, metrics, weights and counters of a training, and the Trainer."""
    # Process 0's weights count: the others begin with other numbers.
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    records, loaders = Records(), (DataLoader(words(count), batch_size) for count in (40, 12))
    trainer = fit(Attends(**sizes), *loaders, resume_from=resume_from, callbacks=[records], **options)
    counters = trainer.state.samples, trainer.state.tokens, trainer.state.step
    return records.losses, dict(trainer.metrics), state_of(trainer), counters, trainer
