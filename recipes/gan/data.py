"""The digits of the `digits` recipe, split for a GAN."""

from __future__ import annotations

from typing import TypedDict

from torch.utils.data import ConcatDataset, DataLoader

from ..digits.data import Batch, digit_splits


class Loaders(TypedDict):
    """The loaders of the recipe, by stage."""

    train: DataLoader[Batch]
    val: DataLoader[Batch]


def gan_loaders(batch_size: int = 64, split_seed: int = 0) -> Loaders:
    """Training images in shuffled batches; 539 held-out ones (val and test of the `digits` recipe) in one batch.

    Args:
        batch_size: images per training batch; a last, shorter one is left out, batch normalisation wants them full.
        split_seed: decides which images are for training.
    """
    train, val, test = digit_splits(split_seed)
    held_out: ConcatDataset[Batch] = ConcatDataset([val, test])
    return {
        "train": DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True),
        "val": DataLoader(held_out, batch_size=len(held_out)),
    }
