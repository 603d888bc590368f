"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, part of that package, nothing to download."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

Batch = tuple[Tensor, ...]
"""Images and labels."""
SPLIT = (0.7, 0.1, 0.2)
"""The shares of train, val and test."""


class Loaders(TypedDict):
    """The loaders of one recipe, by stage."""

    train: DataLoader[Batch]
    val: DataLoader[Batch]
    test: DataLoader[Batch]


def digit_images() -> TensorDataset:
    """All images, float32 of shape (1797, 1, 8, 8) in 0 to 1, with their labels 0 to 9, int64 of shape (1797,)."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target))


def digit_splits(split_seed: int) -> list[Subset[Batch]]:
    """The images split at random into train (1,258), val (180) and test (359); the split depends on the seed alone."""
    return random_split(digit_images(), SPLIT, generator=torch.Generator().manual_seed(split_seed))


def digit_loaders(batch_size: int = 64, split_seed: int = 0) -> Loaders:
    """The three loaders; only the training images are shuffled.

    Args:
        batch_size: images per batch; validation and test use four times as many.
        split_seed: decides which images are for training.
    """
    train, val, test = digit_splits(split_seed)
    return {
        "train": DataLoader(train, batch_size=batch_size, shuffle=True),
        "val": DataLoader(val, batch_size=4 * batch_size),
        "test": DataLoader(test, batch_size=4 * batch_size),
    }
