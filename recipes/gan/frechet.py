"""How far two sets of images are apart."""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(one: Tensor, other: Tensor) -> Tensor:
    """The Fréchet distance of the normal distributions fitted to the pixels of two sets of images.

    It is |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) with means m and covariances C.

    Args:
        one: images of any shape (count, ...); flattened to (count, pixels).
        other: as `one`, with the same pixels; the counts may differ.
    Returns:
        A float64 scalar, 0 for equal sets.
    """
    one, other = one.flatten(1).double(), other.flatten(1).double()
    between_means = (one.mean(dim=0) - other.mean(dim=0)).square().sum()
    first, second = _covariance(one), _covariance(other)
    root = _square_root(first)
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    distance: Tensor = between_means + first.trace() + second.trace() - 2 * shared
    return distance


def _covariance(samples: Tensor) -> Tensor:
    pixels = samples.shape[1]
    return torch.cov(samples.T).reshape(pixels, pixels)  # of a single pixel it is a number


def _square_root(matrix: Tensor) -> Tensor:
    """The root of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
