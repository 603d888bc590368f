"""`skip_first_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from loopwright.data.loader import PreparedLoader
from loopwright.data.samplers import with_seedable_sampler
from loopwright.data.shards import BatchSamplerShard
from loopwright.data.skip import skip_first_batches
from loopwright.data.skipping import batches_from
from loopwright.distributed.errors import ConfigError, DataError
from loopwright.trainer.accelerator import Accelerator


class Counted(Dataset[int]):
    """Keeps what was read of it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_indices_are_skipped_and_nothing_is_read() -> None:
    data = Counted(7)
    loader = DataLoader(data, batch_size=2)
    skipped = skip_first_batches(loader, 2)
    assert isinstance(skipped, DataLoader)
    assert (len(skipped), batches(skipped), data.read) == (2, [[4, 5], [6]], [4, 5, 6])
    assert (len(loader), batches(loader)) == (4, [[0, 1], [2, 3], [4, 5], [6]])


def test_streams_are_read_and_thrown_away() -> None:
    skipped = skip_first_batches(DataLoader(Stream(), batch_size=2), 2)
    assert batches(skipped) == [[4, 5], [6]]
    again = skip_first_batches(skipped, 1)
    assert (batches(again), batches(skipped)) == ([[6]], [[4, 5], [6]])
    assert list(skip_first_batches([1, 2, 3], 1)) == [2, 3]


def test_loaders_without_batches_skip_samples() -> None:
    data = Counted(4)
    assert list(skip_first_batches(DataLoader(data, batch_size=None), 3)) == [3]
    assert data.read == [3]


def test_f15_a_prepared_loader_keeps_its_place_and_its_remainder() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Counted(11), batch_size=2))
    loader.set_epoch(3)
    skipped = accelerator.skip_first_batches(loader, 4)
    assert isinstance(skipped, PreparedLoader)
    assert (skipped.iteration, len(skipped)) == (3, 2)
    seen = []
    for batch in skipped:
        state = accelerator.gradient_state
        seen.append((batch.tolist(), state.end_of_dataloader, state.remainder))
    assert seen == [([8, 9], False, 1), ([10], True, 1)]
    assert not loader.end_of_dataloader


def test_f18b_shuffled_batches_go_on_where_they_were_left() -> None:
    def prepared() -> Any:
        return PreparedLoader(with_seedable_sampler(DataLoader(Counted(12), batch_size=2, shuffle=True), data_seed=1))

    whole = prepared()
    passes = [batches(whole), batches(whole), batches(whole)]
    resumed = prepared()
    resumed.set_epoch(1)
    assert batches(skip_first_batches(resumed, 2)) == passes[1][2:]
    assert resumed.iteration == 2, "the rest of the pass ends the loader's own"
    assert batches(resumed) == passes[2]


def test_skipping_a_whole_pass_leaves_nothing_of_it() -> None:
    loader = PreparedLoader(DataLoader(Counted(4), batch_size=2))
    assert batches(skip_first_batches(loader, 2)) == []
    assert loader.iteration == 1
    assert len(skip_first_batches(DataLoader(Counted(4)), 4)) == 0


def test_skipping_twice_adds_up() -> None:
    loader = PreparedLoader(DataLoader(Counted(8), batch_size=2))
    assert batches(skip_first_batches(skip_first_batches(loader, 1), 2)) == [[6, 7]]


def test_preparing_what_skips() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = accelerator.prepare(skip_first_batches(DataLoader(Counted(6), batch_size=2), 1))
    assert batches(loader) == [[2, 3], [4, 5]]
    stream = accelerator.prepare(skip_first_batches(DataLoader(Stream(), batch_size=2), 3))
    assert [accelerator.gradient_state.active_dataloader is stream for _ in stream] == [True]


@pytest.mark.parametrize("number", [-1, 1.5, True, None])
def test_only_whole_numbers_can_be_skipped(number: Any) -> None:
    with pytest.raises(ConfigError, match=rf"skip_first_batches\(num_batches={number}\)\. Expected an integer >= 0"):
        skip_first_batches([1, 2], number)


def test_more_than_there_are_can_not_be_skipped() -> None:
    with pytest.raises(DataError, match=r"skip_first_batches\(3\): the loader has 2 batches in a pass\. Count the"):
        skip_first_batches(DataLoader(Counted(2)), 3)


def test_a_pass_that_goes_on_draws_its_order_once_also_with_workers() -> None:
    found = []
    for num_workers in (0, 2):
        generator = torch.Generator().manual_seed(3)
        sampler = WeightedRandomSampler(torch.arange(1.0, 14), 12, generator=generator)
        shard = BatchSamplerShard(BatchSampler(sampler, 2, False), 2, 1)
        loader = DataLoader(Counted(13), batch_sampler=shard, num_workers=num_workers)
        found.append(([batch.tolist() for batch in batches_from(loader, 1)], generator.get_state().tolist()))
    whole = torch.multinomial(torch.arange(1.0, 14), 12, True, generator=torch.Generator().manual_seed(3)).tolist()
    assert found[0][0] == [whole[6:8], whole[10:12]]  # its second and third batch
    assert found[1] == found[0]
