"""Dealers: what each says before a pass of the samples in its rounds, against the batches that its processes get."""

from __future__ import annotations

import itertools
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from loopwright.data.dealing import DealtLoader
from loopwright.data.prepare import NativeShard
from loopwright.data.rounds import Dealer
from loopwright.data.shards import BatchSamplerShard, DealtSampler
from loopwright.data.sizes import batch_sizes
from loopwright.distributed.errors import ConfigError


class Other(BatchSampler):
    """A batch sampler of which nobody knows what it gives."""


def sampler(n: int, b: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(n)), b, drop_last)


def batches(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, 1) for size in sizes]


def dealt_sizes(dealers: list[Any]) -> list[int]:
    """Samples of all processes in each round of a pass."""
    rounds = zip_longest(*map(list, dealers), fillvalue=[])
    return [sum(len(batch) for batch in round) for round in rounds]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("w", [2, 4])
def test_a_batch_sampler_shard_tells_its_rounds(w: int, split: bool) -> None:
    for n, even, drop in itertools.product((0, 3, 8, 11, 24), (True, False), (True, False)):
        dealers = [BatchSamplerShard(sampler(n, 4, drop), w, index, split, even) for index in range(w)]
        dealt = dealt_sizes(dealers)
        expected = dealt if even or drop else None
        assert [dealer.round_sizes() for dealer in dealers] == [expected] * w, (n, even, drop)


@pytest.mark.parametrize(
    ("given", "options", "is_told"),
    [
        (batches(2, 2, 2, 2), {}, True), (batches(2, 2, 2), {}, True), (batches(2, 2, 2), {"drop_last": True}, True),
        (batches(2, 2, 1), {}, False), (batches(2, 2), {"split_batches": True}, True),
        (batches(3, 3), {"split_batches": True}, False), (batches(), {}, False),
        (DataLoader(range(6), 2), {}, True), (DataLoader(range(5), 2), {}, False),  # type: ignore[arg-type]
        ((each for each in batches(2, 2)), {}, False),
    ],
)  # fmt: skip
def test_a_dealt_loader_tells_its_rounds(given: Any, options: dict[str, Any], is_told: bool) -> None:
    told = DealtLoader(given, 2, 0, **options).round_sizes()
    assert is_told == (told is not None)
    if is_told:
        assert told == dealt_sizes([DealtLoader(given, 2, index, **options) for index in range(2)])


@pytest.mark.parametrize(
    "dealer",
    [
        BatchSamplerShard(Other(range(8), 2, False), 2, 0), BatchSamplerShard(SequentialSampler(range(8)), 2, 0),
        DealtSampler(sampler(8, 2), 2, 0), NativeShard(2, 0),
    ],
    ids=["another batch sampler", "no batches", "exact", "shared elsewhere"],
)  # fmt: skip
def test_others_do_not_tell(dealer: Dealer) -> None:
    assert dealer.round_sizes() is None


def test_sizes_of_a_pass() -> None:
    assert batch_sizes(batches(2, 2, 1)) == [2, 2, 1]
    assert batch_sizes(DataLoader(range(5), 2)) == [2, 2, 1]  # type: ignore[arg-type]
    assert batch_sizes(DataLoader(range(5), 2, drop_last=True)) == [2, 2]  # type: ignore[arg-type]
    unknown = [[3], [(torch.zeros(2), torch.zeros(3))], DataLoader(range(5), None), iter(batches(1))]  # type: ignore[arg-type]
    assert [batch_sizes(each) for each in unknown] == [None] * 4


def test_a_place_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"DealtLoader\(process_index=2\) with num_processes=2. Expected an index"):
        DealtLoader(batches(1), 2, 2)
