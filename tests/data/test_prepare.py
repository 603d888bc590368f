"""`prepare_loader` for each process of several, constructed in one: whose batches they are, what is told of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from loopwright.data.combined import CombinedLoader
from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import Presharded, prepare_loader
from loopwright.data.samplers import SeedableRandomSampler
from loopwright.data.skip import skip_first_batches
from loopwright.distributed.errors import ConfigError, DataError


@dataclass
class Place:
    """A process among others."""

    process_index: int
    num_processes: int


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def prepared(loader: Any, index: int, w: int = 2, *, exact: bool = False, **options: Any) -> PreparedLoader:
    """The loader of one process; each process reads for itself, and the seed is given."""
    options = {"data_seed": 3, "dispatch_batches": False} | options
    return prepare_loader(
        loader,
        process=Place(index, w),
        configuration=DataLoaderConfiguration(**options),
        device=torch.device("cpu"),
        active=[],
        exact=exact,
    )


def passes(loaders: list[PreparedLoader]) -> list[list[Any]]:
    """Each process's batches; each length is checked where there is one."""
    found = [[as_list(batch) for batch in loader] for loader in loaders]
    lengths = [loader.length for loader in loaders]
    assert None in lengths or lengths == [len(batches) for batches in found]
    return found


def as_list(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def dealt(loader: Any, w: int = 2, **options: Any) -> list[list[Any]]:
    return passes([prepared(loader, index, w, **options) for index in range(w)])


def remainders(loader: PreparedLoader) -> list[int]:
    return [loader.remainder for _ in loader]


def test_f1_a_loader_is_shared_by_whole_batches() -> None:
    loader = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    assert dealt(loader) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert dealt(loader, even_batches=False) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert dealt(DataLoader(range(10), batch_size=4), split_batches=True) == dealt(loader)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "the loader is as before"


def test_what_a_shared_loader_says_of_itself() -> None:
    data = list(range(11))
    whole = prepared(DataLoader(data, batch_size=2), 1)
    assert (whole.total_batch_size, whole.total_dataset_length, len(whole), whole.is_even) == (4, 11, 3, True)
    assert (whole.batch_size, whole.dataset, whole.even_batches, whole.splits_batches) == (2, data, True, False)
    split = prepared(DataLoader(data, batch_size=4), 1, split_batches=True)
    assert (split.total_batch_size, len(split), split.splits_batches) == (4, 3, True)
    uneven = prepared(DataLoader(data[:10], batch_size=2), 1, even_batches=False)
    assert (len(uneven), uneven.is_even) == (2, False)
    uneven.even_batches = True
    assert (len(uneven), uneven.is_even) == (3, True)
    alone = prepared(DataLoader(data), 0, 1)
    assert (alone.is_even, alone.even_batches) == (True, None)
    with pytest.raises(ConfigError, match=r"even_batches=False: this loader's rounds are not completed by choice"):
        alone.even_batches = False


@pytest.mark.parametrize(
    ("n", "options", "configuration", "expected"),
    [
        (10, {"batch_size": 2}, {}, [2, 2, 2]),
        (9, {"batch_size": 2}, {}, [1, 1, 1]),
        (8, {"batch_size": 2}, {}, [0, 0]),
        (9, {"batch_size": 2, "drop_last": True}, {}, [-1, -1]),
        (9, {"batch_size": 4}, {"split_batches": True}, [1, 1, 1]),
    ],
)
def test_f11_the_remainder_is_that_of_all_processes(n: int, options: Any, configuration: Any, expected: Any) -> None:
    for index in range(2):
        loader = prepared(DataLoader(range(n), **options), index, **configuration)  # type: ignore[arg-type]
        assert remainders(loader) == expected
        assert loader.remainder == -1


def test_f15_the_remainder_is_right_where_a_pass_goes_on() -> None:
    """Where Accelerate keeps the duplicate of 11 samples."""
    loaders = [prepared(DataLoader(range(11), batch_size=2), index) for index in range(2)]  # type: ignore[arg-type]
    skipped = [skip_first_batches(loader, 2) for loader in loaders]
    assert passes(skipped) == [[[8, 9]], [[10, 0]]]
    assert [remainders(loader) for loader in skipped] == [[3], [3]]
    raw = skip_first_batches(DataLoader(range(11), batch_size=2), 1)  # type: ignore[arg-type]
    assert [remainders(prepared(raw, index)) for index in range(2)] == [[1, 1, 1]] * 2


def test_f14_the_remainder_of_streams_is_known_at_their_end() -> None:
    """Where Accelerate keeps three duplicates of 9 samples."""
    for index in range(2):
        loader = prepared(DataLoader(Stream(9), batch_size=2), index)
        assert remainders(loader) == [-1, -1, 1]
        assert remainders(prepared(DataLoader(Stream(8), batch_size=2), index)) == [-1, 0]
        assert remainders(prepared(DataLoader(Stream(9), batch_size=4), index, split_batches=True)) == [-1, -1, 1]
        assert remainders(prepared(DataLoader(Stream(9), batch_size=2, drop_last=True), index)) == [-1, -1]
        skipped = skip_first_batches(loader, 2)
        assert remainders(skipped) == [1]


def test_f8_streams_are_shared_by_blocks() -> None:
    assert dealt(DataLoader(Stream(9), batch_size=2)) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    assert dealt(DataLoader(Stream(9), batch_size=4), split_batches=True) == dealt(DataLoader(Stream(9), batch_size=2))
    assert dealt(DataLoader(Stream(5), batch_size=None)) == [[0, 2, 4], [1, 3, 0]]
    skipped = [skip_first_batches(prepared(DataLoader(Stream(9), batch_size=2), index), 1) for index in range(2)]
    assert passes(skipped) == [[[4, 5], [8, 0]], [[6, 7], [1, 2]]]


def test_any_iterable_is_dealt_by_whole_batches() -> None:
    batches = [torch.tensor([2 * i, 2 * i + 1]) for i in range(5)]
    expected = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert dealt(batches) == expected
    assert passes([prepared((b for b in batches), index) for index in range(2)]) == expected
    assert dealt(batches, even_batches=False) == [expected[0], expected[1][:2]]
    assert dealt(batches, split_batches=True) == [[[b[0].item()] for b in batches], [[b[1].item()] for b in batches]]
    assert remainders(prepared(batches, 0)) == [-1, -1, 2]
    assert remainders(prepared(batches[:4], 0)) == [-1, 0]
    assert dealt(["a", "b", "c"]) == [["a", "c"], ["b", "a"]]


def test_a_combined_loader_is_dealt_by_whole_items_and_shuffles_alike() -> None:
    def make() -> CombinedLoader:
        left, right = (DataLoader(range(6), batch_size=2, shuffle=True) for _ in range(2))  # type: ignore[arg-type]
        return CombinedLoader({"left": left, "right": right})

    loaders = []
    for index in range(2):
        torch.manual_seed(index)  # what processes drew before does not count
        loaders.append(prepared(make(), index))
    first, second = passes(loaders)
    items = [first[0], second[0], first[1]]
    assert sorted(x for item in items for x in item["left"].tolist()) == list(range(6))
    assert [len(first), len(second)] == [2, 2]
    with pytest.raises(ConfigError, match="a CombinedLoader of prepared loaders can't be shared"):
        prepared(CombinedLoader([prepared([1, 2], 0)]), 0)


def test_items_without_batches_are_dealt() -> None:
    assert dealt(DataLoader([10, 11, 12], batch_size=None)) == [[10, 12], [11, 10]]
    batches = BatchSampler(SequentialSampler(range(5)), 2, False)

    class ByLists(Dataset[Any]):
        def __getitem__(self, indices: Any) -> Any:
            return torch.tensor(indices)

    loader = DataLoader(ByLists(), sampler=batches, batch_size=None)  # type: ignore[arg-type]
    assert dealt(loader) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]


def test_exact_dealing_gives_every_sample_once() -> None:
    loader = DataLoader(range(9), batch_size=2)  # type: ignore[arg-type]
    expected = [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert dealt(loader, exact=True) == expected
    assert dealt(loader, exact=True, split_batches=True, even_batches=True) == expected
    assert dealt(DataLoader(Stream(9), batch_size=2), exact=True) == expected
    assert dealt([[0, 1], [2, 3], [4, 5], [6, 7], [8]], exact=True) == expected
    assert dealt(DataLoader(range(3), batch_size=None), exact=True) == [[0, 2], [1]]  # type: ignore[arg-type]
    dropping = DataLoader(range(7), batch_size=2, drop_last=True)  # type: ignore[arg-type]
    assert dealt(dropping, exact=True) == [[[0, 1], [4, 5]], [[2, 3]]]
    assert dealt(loader, w=7, exact=True)[5:] == [[], []]
    assert not prepared(loader, 0, exact=True).is_even
    assert prepared(DataLoader(range(8), batch_size=2), 0, exact=True).is_even  # type: ignore[arg-type]


@pytest.mark.parametrize(("b", "w"), [(1, 2), (2, 2), (1, 3), (2, 3)])
def test_pain_11_each_of_5_samples_is_seen_once(b: int, w: int) -> None:
    loader = DataLoader(range(5), batch_size=b)  # type: ignore[arg-type]
    seen = [sample for batches in dealt(loader, w, exact=True) for batch in batches for sample in batch]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert sum(seen) / len(seen) == 2.0


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1))

    def __len__(self) -> int:
        return 8


def in_step_order(batches: list[list[Any]]) -> list[Any]:
    return [sample for step in zip(*batches, strict=True) for batch in step for sample in batch]


def test_b61_a_custom_sampler_keeps_its_order() -> None:
    for batch_size in (1, 2):
        loader = DataLoader(range(8), batch_size=batch_size, sampler=Backwards())  # type: ignore[arg-type]
        assert in_step_order(dealt(loader)) == list(range(7, -1, -1))
        assert isinstance(prepared(loader, 0).sampler, Backwards)


def test_b61_shuffling_stays_and_changes_with_the_epoch() -> None:
    loaders = [prepared(DataLoader(range(8), batch_size=2, shuffle=True), index) for index in range(2)]  # type: ignore[arg-type]
    orders = [in_step_order(passes(loaders)) for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(8))] * 2
    assert orders[0] != orders[1]
    assert orders == [list(SeedableRandomSampler(range(8), 3)), list(SeedableRandomSampler(range(8), 4))]


def test_whoever_prepared_it_a_loader_is_shared_once() -> None:
    loader = prepared(DataLoader(range(4)), 1)  # type: ignore[arg-type]
    again = prepare_loader(
        loader, process=Place(1, 2), configuration=DataLoaderConfiguration(), device=None, active=loader.active
    )
    assert again is loader
    elsewhere = prepared(loader, 1)
    assert elsewhere is not loader
    assert passes([elsewhere]) == [[[1], [3]]]
    rest = skip_first_batches([10, 11, 12, 13], 1)  # prepared by nobody
    assert dealt(rest) == [[11, 13], [12, 11]]


def test_datasets_that_shard_themselves_do_so() -> None:
    class Sharding(Stream):
        n_shards = 4
        offset, step = 0, 1

        def shard(self, num_shards: int, index: int) -> Sharding:
            part = Sharding(self.count)
            part.offset, part.step = index, num_shards
            return part

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.offset, self.count, self.step))

    loader = DataLoader(Sharding(7), batch_size=2)
    assert dealt(loader) == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert not prepared(loader, 0).is_even
    assert dealt(loader, w=5)[0] == [[0, 1]], "too few shards: every process reads all"


# What can't be shared


def test_batches_that_can_not_be_split() -> None:
    with pytest.raises(ConfigError, match=r"a batch size of 3 can't be split evenly among 2 processes"):
        prepared(DataLoader(range(9), batch_size=3), 0, split_batches=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a batch size of 3 can't be split evenly among 2 processes"):
        prepared(DataLoader(Stream(9), batch_size=3), 0, split_batches=True, dispatch_batches=True)
    for batch, what in ({"text": ["a"]}, r"batch\['text'\]"), (torch.tensor(1), "batch is a tensor without a dim"):
        with pytest.raises(DataError, match=rf"a batch can't be split among processes: .*{what}"):
            list(prepared([batch], 0, split_batches=True))
    uneven = {"x": torch.ones(2), "y": torch.ones(3)}
    with pytest.raises(DataError, match=r"number of samples can't be told: batch\['x'\] has 2"):
        list(prepared([uneven], 0, split_batches=True))
    with pytest.raises(DataError, match="it holds no sample"):
        list(prepared([torch.ones(0, 2)], 0, split_batches=True))


def test_more_processes_than_batches() -> None:
    loader = DataLoader(range(3), batch_size=1, drop_last=True)  # type: ignore[arg-type]
    for index in range(4):
        with pytest.raises(DataError, match=r"the DataLoader has 3 batches for 4 processes, and drop_last=True leaves"):
            prepared(loader, index, 4)
    assert dealt(DataLoader(range(3)), w=4) == [[[0]], [[1]], [[2]], [[0]]]  # type: ignore[arg-type]
    assert dealt(DataLoader(range(3)), w=4, even_batches=False)[3] == []  # type: ignore[arg-type]


def test_dispatching_needs_a_device() -> None:
    def prepare(device: torch.device | None, **options: Any) -> PreparedLoader:
        return prepare_loader(
            DataLoader(Stream(4)),
            process=Place(0, 2),
            configuration=DataLoaderConfiguration(**options),
            device=device,
            active=[],
        )

    with pytest.raises(ConfigError, match=r"dispatch_batches=True for a loader whose batches stay where they are"):
        prepare(None, dispatch_batches=True)
    assert passes([prepare(None)]) == [[[0], [2]]]
    with pytest.warns(UserWarning, match="even_batches=False has no effect on a loader that the main process reads"):
        prepare(torch.device("cpu"), even_batches=False)


def test_mappings_of_other_classes_are_split_as_such() -> None:
    batch = UserDict(x=torch.arange(4))
    (part,) = prepared([batch], 1, split_batches=True)
    assert type(part) is UserDict
    assert part["x"].tolist() == [2, 3]


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_samples_are_not_dealt_to_processes_twice(is_batched: bool, exact: bool) -> None:
    def loader(index: int, count: int) -> DataLoader[int]:
        sampler: Any = DistributedSampler(range(8), count, index, shuffle=False)  # type: ignore[arg-type]
        if is_batched:
            return DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False))  # type: ignore[arg-type]
        return DataLoader(range(8), batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    for index in range(2):
        for given in (loader(index, 2), CombinedLoader([loader(index, 2)])):
            with pytest.raises(ConfigError, match=r"DistributedSampler gives each of 2 .* Presharded\("):
                prepared(given, index, exact=exact)
    kept = [prepared(Presharded(loader(index, 2)), index, exact=exact) for index in range(2)]
    assert passes(kept) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    alone = [prepared(loader(0, 1), index, exact=exact) for index in range(2)]  # deals to nobody: shared as any other
    assert passes(alone) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert passes([prepared(loader(0, 1), 0, 1, exact=exact)]) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_a_distributed_sampler_that_is_kept_is_told_the_epoch() -> None:
    sampler: Any = DistributedSampler(range(8), 2, 0, shuffle=True)  # type: ignore[arg-type]
    prepared(Presharded(DataLoader(range(8), sampler=sampler)), 0).set_epoch(5)  # type: ignore[arg-type]
    assert sampler.epoch == 5
