"""`CombinedLoader`: several loaders read as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loopwright.data.combined import CombinedLoader, Mode
from loopwright.data.sizes import loader_length
from loopwright.distributed.errors import ConfigError, DataError


class Stream:
    """Can be iterated any number of times, and has no length."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)


CASES: dict[Mode, tuple[list[Any], int]] = {
    "min_size": ([[1, 10], [2, 20]], 2),
    "max_size_cycle": ([[1, 10], [2, 20], [3, 10]], 3),
    "max_size": ([[1, 10], [2, 20], [3, None]], 3),
    "sequential": ([1, 2, 3, 10, 20], 5),
}


@pytest.mark.parametrize("mode", CASES)
def test_a_list(mode: Mode) -> None:
    items, length = CASES[mode]
    loader = CombinedLoader([[1, 2, 3], [10, 20]], mode)
    assert list(loader) == items
    assert len(loader) == length
    assert list(loader) == items  # again


@pytest.mark.parametrize("mode", CASES)
def test_a_mapping(mode: Mode) -> None:
    items, _ = CASES[mode]
    named = items if mode == "sequential" else [dict(zip("ab", item, strict=True)) for item in items]
    assert list(CombinedLoader({"a": [1, 2, 3], "b": [10, 20]}, mode)) == named


@pytest.mark.parametrize("mode", CASES)
def test_of_equal_length_or_alone(mode: Mode) -> None:
    equal = CombinedLoader([[1, 2], [10, 20]], mode)
    assert list(equal) == ([1, 2, 10, 20] if mode == "sequential" else [[1, 10], [2, 20]])
    alone = CombinedLoader([[1, 2]], mode)
    assert list(alone) == ([1, 2] if mode == "sequential" else [[1], [2]])


def test_cycling_goes_on_as_often_as_it_takes() -> None:
    loader = CombinedLoader([[1, 2, 3, 4, 5], [10, 20], [100]], "max_size_cycle")
    assert list(loader) == [[1, 10, 100], [2, 20, 100], [3, 10, 100], [4, 20, 100], [5, 10, 100]]


def test_the_shortest_may_come_first() -> None:
    assert list(CombinedLoader([[1], [10, 20]], "min_size")) == [[1, 10]]
    assert list(CombinedLoader([[1], [10, 20]], "max_size")) == [[1, 10], [None, 20]]
    assert list(CombinedLoader([[1], [10, 20]], "max_size_cycle")) == [[1, 10], [1, 20]]


@pytest.mark.parametrize(("mode", "expected"), [("min_size", []), ("max_size", [[None, 1]]), ("sequential", [1])])
def test_an_empty_one(mode: Mode, expected: list[Any]) -> None:
    assert list(CombinedLoader([[], [1]], mode)) == expected


def test_what_can_not_be_cycled() -> None:
    with pytest.raises(
        DataError, match=r"loader 1 of a CombinedLoader gives no batch when it is begun again. Use mode="
    ):
        list(CombinedLoader([[1, 2, 3], iter([10])], "max_size_cycle"))
    with pytest.raises(DataError, match=r"loader 'b' of a CombinedLoader gives no batch"):
        list(CombinedLoader({"a": [1], "b": []}, "max_size_cycle"))


class TestLength:
    def test_without_lengths(self) -> None:
        for mode in CASES:
            loader = CombinedLoader([Stream(1, 2), Stream(10)], mode)
            assert loader_length(loader) is None
            assert len(list(loader)) == {"min_size": 1, "sequential": 3}.get(mode, 2)

    def test_one_without(self) -> None:
        # The shortest of those that are known; the stream may still be shorter.
        assert loader_length(CombinedLoader([[1, 2, 3], Stream(10)], "min_size")) == 3
        for mode in ("max_size", "max_size_cycle", "sequential"):
            with pytest.raises(TypeError, match="a loader of this CombinedLoader has no length"):
                len(CombinedLoader([[1, 2, 3], Stream(10)], mode))  # type: ignore[arg-type]


def test_everybody_who_listens_is_told_the_epoch() -> None:
    told: list[tuple[str, int]] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            told.append((self.name, epoch))

    class Data(Listener, Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return torch.ones(1)

    class Sampler(Listener, torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([0])

    class Loader(Listener):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    class Batches(Listener, torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1]])

    loaders = [
        DataLoader(Data("data"), sampler=Sampler("sampler")),
        DataLoader([1, 2], batch_sampler=Batches("batches")),  # type: ignore[arg-type]
        Loader("loader"),
        [1, 2],
    ]
    CombinedLoader(loaders).set_epoch(4)
    assert sorted(told) == [("batches", 4), ("data", 4), ("loader", 4), ("sampler", 4)]


class Shuffled:
    """A sampler that says its epoch, and looks at it when its first index is wanted."""

    epoch = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        for index in range(self.count):
            yield 100 * epoch + index


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequential", [100, 101, 102, 100, 101]),
        ("max_size_cycle", [[100, 100], [101, 101], [102, 100]]),
    ],
)
@pytest.mark.parametrize("skipped", [0, 1])
def test_loaders_that_begin_later_are_of_the_epoch_of_their_pass(mode: Mode, expected: Any, skipped: int) -> None:
    """Also where another epoch is set in the middle of it, which is that of the next pass."""

    def loader_of(count: int) -> Any:
        return DataLoader(range(1000), sampler=Shuffled(count), batch_size=None)  # type: ignore[arg-type]

    loader = CombinedLoader([loader_of(3), loader_of(2)], mode)
    loader.set_epoch(1)
    iterator = loader.iterate_from(skipped)
    first = next(iterator)
    loader.set_epoch(2)
    assert [first, *iterator] == expected[skipped:]
    assert next(iter(loader)) == (200 if mode == "sequential" else [200, 200])


@pytest.mark.parametrize(
    ("loaders", "mode", "message"),
    [
        ([[1]], "max_size_cylce", r"CombinedLoader\(mode='max_size_cylce'\) is unknown. Did you mean 'max_size_cycle'"),
        ([], "min_size", r"CombinedLoader has no loader. Pass at least one"),
        ({}, "min_size", r"CombinedLoader has no loader"),
    ],
)
def test_wrong_ones(loaders: Any, mode: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CombinedLoader(loaders, mode)
