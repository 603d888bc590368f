"""What the loops train: the same small models and loaders for every loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]

VOCABULARY = 256
SEQUENCE = 64
WIDTH = 192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model with its data. A loop's step is `loss(model(x), y)`, backward, optimizer step, zero_grad."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    """Makes that many samples: inputs and targets."""
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    shuffle: bool = True
    accumulate: int = 1
    """Batches per optimizer step."""
    block_steps: int = 300
    """Optimizer steps that one loop runs in one round."""

    def build(self, steps: int) -> tuple[nn.Module, Optimizer, Loader]:
        """The same model, optimizer and loader for every loop; one epoch is `steps` optimizer steps."""
        torch.manual_seed(0)
        model = self.model()
        tensors = self.data(steps * self.accumulate * self.batch_size)
        loader: Loader = DataLoader(TensorDataset(*tensors), batch_size=self.batch_size, shuffle=self.shuffle)
        return model, self.optimizer(model), loader

    @staticmethod
    def optimizer(model: nn.Module) -> Optimizer:
        """Plain SGD, the cheapest there is: it hides least of what a loop adds."""
        return torch.optim.SGD(model.parameters(), lr=0.01)


class SmallTransformer(nn.Module):
    """Two transformer layers over bytes, about one million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, vocabulary, sequence), as `cross_entropy` takes them, of tokens (batch, sequence)."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits.transpose(1, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _vectors(inputs: int, outputs: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, inputs), torch.randn(count, outputs))


def _tokens(count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCABULARY, (count, SEQUENCE + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


TINY = Workload(name="tiny", model=_mlp, data=_vectors(32, 10), loss=F.mse_loss, batch_size=16)
LINEAR = replace(TINY, name="linear", model=lambda: nn.Linear(8, 8), data=_vectors(8, 8), batch_size=1, shuffle=False)
"""The smallest step there is: the share of a loop's own calls is greatest here."""
WIDE = replace(TINY, name="wide", model=_wide, data=_vectors(256, 10), batch_size=32)
"""A step of some milliseconds, in few large operations."""
WORKLOADS = {
    work.name: work
    for work in (
        TINY,
        replace(TINY, name="tiny8", accumulate=8, block_steps=60),
        Workload(name="mid", model=SmallTransformer, data=_tokens, loss=F.cross_entropy, batch_size=8, block_steps=25),
    )
}
