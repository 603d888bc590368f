"""A small training under an `Accelerator`, for the tests of its checkpoints; the workers import it as well."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from loopwright.trainer.accelerator import Accelerator

NUM_SAMPLES = 12


class Numbered(Dataset[Any]):
    """Samples that say their number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((3,), float(index)) / NUM_SAMPLES


class Drawing(Numbered):
    """The same with augmentation."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, super().__getitem__(index)[1] + torch.rand(3)


class Trained(NamedTuple):
    """What a script has at hand."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any


def build(
    dataset: Dataset[Any] | None = None, *, batch_size: int = 2, width: int = 4, seed: int = 3, **options: Any
) -> Trained:
    """A model with dropout, AdamW, a schedule and a shuffled loader, prepared."""
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(dataset or Numbered(), batch_size=batch_size, shuffle=True)
    return Trained(accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def train(
    trained: Trained, *, epochs: range, skipped: int = 0, save_at: tuple[int, int] | None = None, path: Any = None
) -> list[Any]:
    """Train, and save behind a batch of an epoch. Gives for each batch its epoch, its samples and its loss."""
    accelerator, model, optimizer, scheduler, loader = trained
    seen = []
    for epoch in epochs:
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for batch, (numbers, inputs) in enumerate(rest, start=skipped + 1):
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((epoch, numbers.tolist(), loss.item()))
            if save_at == (epoch, batch):
                accelerator.save_state(path)
        skipped = 0
    return seen


def weights(trained: Trained) -> dict[str, Any]:
    """The weights as lists, which compare bit for bit."""
    state = trained.accelerator.get_state_dict(trained.model)
    return {name: value.tolist() for name, value in state.items()}
