"""`BatchSamplerShard` and `IterableDatasetShard`: who gets which samples. F: facts of semantics about Accelerate."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from loopwright.data.samplers import SkippingSampler
from loopwright.data.shards import BatchSamplerShard, DealtSampler, IterableDatasetShard, sample_count
from loopwright.distributed.errors import ConfigError

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


class Stream(IterableDataset[int]):
    """Counts up to a number; has a length if asked."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class AnySizes:
    """A batch sampler whose batches have any sizes."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def sampler(n: int, b: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(n)), b, drop_last)


def shards(batch_sampler: Any, w: int, **options: Any) -> list[list[list[int]]]:
    """Each process's batches; each length is checked on the way."""
    found = [BatchSamplerShard(batch_sampler, w, index, **options) for index in range(w)]
    batches = [list(shard) for shard in found]
    assert [len(shard) for shard in found] == [len(each) for each in batches]
    assert {shard.is_even for shard in found} == {len({len(each) for each in batches}) == 1}
    return batches


@pytest.mark.parametrize(
    ("n", "b", "w", "expected"),
    [
        (10, 2, 2, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        (7, 2, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (9, 2, 2, [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]),
        (3, 2, 3, [[[0, 1]], [[2, 0]], [[1, 2]]]),
        (1, 2, 4, [[[0, 0]]] * 4),
        (5, 4, 3, [[[0, 1, 2, 3]], [[4, 0, 1, 2]], [[3, 4, 0, 1]]]),
        (2, 3, 2, [[[0, 1, 0]], [[1, 0, 1]]]),
        (11, 2, 4, [[[0, 1], [8, 9]], [[2, 3], [10, 0]], [[4, 5], [1, 2]], [[6, 7], [3, 4]]]),
        (0, 2, 3, [[], [], []]),
    ],
)
def test_f1_to_f4_the_last_round_is_completed_from_the_beginning(
    n: int, b: int, w: int, expected: list[list[list[int]]]
) -> None:
    assert shards(sampler(n, b), w) == expected


@pytest.mark.parametrize(
    ("n", "b", "w", "dropped", "uneven"),
    [
        (10, 2, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]),
        (7, 2, 2, [[[0, 1]], [[2, 3]]], [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        (3, 2, 3, [[], [], []], [[[0, 1]], [[2]], []]),
    ],
)
def test_f1_to_f3_or_it_is_left_out_or_left_short(n: int, b: int, w: int, dropped: Any, uneven: Any) -> None:
    assert shards(sampler(n, b, drop_last=True), w) == dropped
    assert shards(sampler(n, b), w, even_batches=False) == uneven


def test_f5_batches_are_split() -> None:
    """The length of the second process is 2 without completion, where Accelerate says 3."""
    split = {"split_batches": True}
    assert shards(sampler(10, 4), 2, **split) == shards(sampler(10, 2), 2)
    assert shards(sampler(10, 4, drop_last=True), 2, **split) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert shards(sampler(10, 4), 2, even_batches=False, **split) == uneven
    assert [batches[-1] for batches in shards(sampler(9, 4), 2, **split)] == [[8, 0], [1, 2]]
    assert shards(sampler(3, 4), 4, **split) == [[[0]], [[1]], [[2]], [[0]]]
    with pytest.raises(
        ConfigError, match=r"a batch size of 3 can't be split evenly among 2 processes\. Use a multiple"
    ):
        BatchSamplerShard(sampler(9, 3), 2, 0, True)
    with pytest.raises(ConfigError, match=r"split_batches=True with a AnySizes that has no batch_size"):
        BatchSamplerShard(AnySizes([0]), 2, 0, True)


def test_a_length_that_can_not_be_known_is_none() -> None:
    class Unsized(AnySizes):
        batch_size = 2

    shard = BatchSamplerShard(Unsized([0, 1], [2]), 2, 1, split_batches=True, even_batches=False)
    assert list(shard) == [[1]]
    with pytest.raises(TypeError, match="whose sampler has no length"):
        len(shard)
    assert not shard.is_even


def test_f7_batches_of_any_sizes_are_dealt_whole() -> None:
    assert shards(AnySizes([0], [1, 2], [3]), 2) == [[[0], [3]], [[1, 2], [0]]]
    five = AnySizes([0, 1], [2], [3, 4], [5], [6])
    assert shards(five, 2) == [[[0, 1], [3, 4], [6]], [[2], [5], [0, 1]]]
    assert shards(five, 2, even_batches=False) == [[[0, 1], [3, 4], [6]], [[2], [5]]]
    assert shards(AnySizes([0, 1]), 3) == [[[0, 1]]] * 3


def test_a_short_batch_in_the_middle_ends_nothing() -> None:
    class Midway(AnySizes):
        batch_size = 2

    assert shards(Midway([0, 1], [2], [3, 4], [5, 6]), 2) == [[[0, 1], [3, 4]], [[2], [5, 6]]]


@pytest.mark.parametrize(
    ("n", "b", "options", "expected"),
    [
        (10, 2, {}, 2), (7, 2, {}, 3), (8, 2, {}, 0), (7, 2, {"even_batches": False}, 3),
        (10, 4, {"split_batches": True}, 2), (8, 4, {"split_batches": True}, 0),
    ],
)  # fmt: skip
def test_f11_the_samples_of_the_last_round_are_counted(n: int, b: int, options: Any, expected: int) -> None:
    shard = BatchSamplerShard(sampler(n, b), 2, 1, **options)
    assert shard.real_samples == -1
    list(shard)
    assert shard.real_samples == expected
    dropping = BatchSamplerShard(sampler(n, b, drop_last=True), 2, 1, **options)
    list(dropping)
    assert dropping.real_samples == -1


def test_what_skips_tells_its_samples_and_sizes() -> None:
    skipping = SkippingSampler(sampler(11, 2), 1)
    assert (skipping.batch_size, skipping.drop_last, sample_count(skipping)) == (2, False, 9)
    assert shards(skipping, 2) == [[[2, 3], [6, 7], [10, 2]], [[4, 5], [8, 9], [3, 4]]]
    assert sample_count(AnySizes([0])) is None


def test_dealt_items_come_once() -> None:
    parts = [DealtSampler(sampler(9, 2), 2, index) for index in range(2)]
    assert [list(part) for part in parts] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert [len(part) for part in parts] == [3, 2]
    assert not parts[0].is_even


def streamed(n: int, b: int, w: int, **options: Any) -> list[list[int]]:
    found = [IterableDatasetShard(SizedStream(n), b, num_processes=w, process_index=i, **options) for i in range(w)]
    samples = [list(shard) for shard in found]
    assert [len(shard) for shard in found] == [len(each) for each in samples]
    return samples


def test_f8_streams_are_shared_by_blocks() -> None:
    """The lengths are right where batches are split, too; Accelerate says 8 for 6."""
    expected = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]
    assert streamed(10, 2, 2) == streamed(10, 4, 2, split_batches=True) == expected
    assert streamed(10, 2, 2, drop_last=True) == [each[:4] for each in expected]
    assert streamed(3, 2, 2) == [[0, 1], [2, 0]]
    assert streamed(10, 2, 2, even_batches=False) == [expected[0], expected[1][:4]]
    assert streamed(0, 2, 2) == [[], []]
    with pytest.raises(ConfigError, match=r"a batch size of 1 can't be split evenly among 2 processes"):
        streamed(10, 1, 2, split_batches=True)
    with pytest.raises(TypeError, match="has no len"):
        len(IterableDatasetShard(Stream(3)))  # type: ignore[arg-type]


def test_streams_of_any_objects_know_their_real_samples() -> None:
    shard = IterableDatasetShard(["a", {"b": 1}, None, "d", "e"], 2, num_processes=2, process_index=1)
    assert list(shard) == [None, "d", {"b": 1}, None]
    assert shard.real_samples == 1
    full = IterableDatasetShard(range(4), 2, num_processes=2, process_index=1)
    assert (list(full), full.real_samples) == ([2, 3], 0)


def test_streams_are_told_the_epoch() -> None:
    class Listening(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Random(Stream):
        generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(self.count, generator=self.generator).tolist())

    listening = IterableDatasetShard(Listening(2))
    listening.set_epoch(3)
    assert (listening.epoch, listening.dataset.epoch) == (3, 3)
    parts = [IterableDatasetShard(Random(8), 2, num_processes=2, process_index=index) for index in range(2)]
    first = [list(part) for part in parts]
    assert sorted(first[0] + first[1]) == list(range(8))
    for part in parts:
        part.set_epoch(1)
    second = [list(part) for part in parts]
    assert sorted(second[0] + second[1]) == list(range(8))
    assert second != first


@pytest.mark.parametrize("kind", [BatchSamplerShard, IterableDatasetShard])
def test_an_index_outside_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Shard\(process_index=2\) with num_processes=2\. Expected an index below"):
        kind(sampler(4, 2), num_processes=2, process_index=2)
    with pytest.raises(ConfigError, match=r"Shard\(num_processes=0\)\. Expected an integer >= 1"):
        kind(sampler(4, 2), num_processes=0)


@needs_accelerate
def test_the_shards_are_accelerates() -> None:
    """Every small case, batch for batch; only the lengths that are wrong there differ."""
    from accelerate.data_loader import BatchSamplerShard as Theirs
    from accelerate.data_loader import IterableDatasetShard as TheirStream

    flags = itertools.product([False, True], repeat=3)
    for (drop, split, even), n, b, w in itertools.product(flags, range(14), (1, 2, 3, 4), (1, 2, 3, 4)):
        if split and b % w:
            continue
        for index in range(w):
            case = (n, b, w, index, drop, split, even)
            base = sampler(n, b, drop)
            shard = BatchSamplerShard(base, w, index, split, even)
            found = list(shard)
            assert found == list(Theirs(base, w, index, split, even)), case
            assert len(shard) == len(found), case
            if even:
                ours = list(IterableDatasetShard(Stream(n), b, drop, w, index, split))
                assert ours == list(TheirStream(Stream(n), b, drop, w, index, split)), case


@needs_accelerate
def test_batches_of_any_sizes_are_dealt_as_accelerates() -> None:
    from accelerate.data_loader import BatchSamplerShard as Theirs

    generator = torch.Generator().manual_seed(0)
    for count, w, even in itertools.product(range(9), (1, 2, 3, 4), (False, True)):
        sizes = torch.randint(1, 4, (count,), generator=generator).tolist()
        base: Any = AnySizes(*(list(range(size)) for size in sizes))
        for index in range(w):
            theirs = list(Theirs(base, w, index, False, even))
            assert list(BatchSamplerShard(base, w, index, False, even)) == theirs, (sizes, w, index, even)


def test_a_loader_takes_a_shard() -> None:
    loader = DataLoader(list(range(10)), batch_sampler=BatchSamplerShard(sampler(10, 2), 2, 1))
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7], [0, 1]]
