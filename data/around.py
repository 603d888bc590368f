"""What is put around a user's datasets and samplers, and how to look through it."""

from __future__ import annotations

from typing import Any


class DatasetAround:
    """The base of what stands around a user's dataset, besides those that tell it the epoch."""

    dataset: Any


class IndicesAround:
    """The base of what stands around a sampler or batch sampler and adds to its items."""

    sampler: Any


def within(dataset: Any) -> Any:
    """A dataset without what stands around it, but for what tells it the epoch."""
    while isinstance(dataset, DatasetAround):
        dataset = dataset.dataset
    return dataset


def own_sampler(sampler: Any) -> Any:
    """The sampler or batch sampler without what adds to its items."""
    while isinstance(sampler, IndicesAround):
        sampler = sampler.sampler
    return sampler
