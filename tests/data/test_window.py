"""Windows: the micro-batches of one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loopwright.data.loader import PreparedLoader
from loopwright.data.window import Remainder, Window, WindowReader, check_length
from loopwright.distributed.errors import DataError


def read(count: int, size: int, **options: Any) -> list[tuple[list[int], int, bool, bool]]:
    reader = WindowReader(PreparedLoader(list(range(count))), size, **options)
    return [(w.batches, w.size, w.closes, w.is_last) for w in reader]


class TestFlush:
    @pytest.mark.parametrize(
        ("count", "size", "expected"),
        [
            (4, 2, [([0, 1], 2, True, False), ([2, 3], 2, True, True)]),
            (5, 2, [([0, 1], 2, True, False), ([2, 3], 2, True, False), ([4], 1, True, True)]),
            (3, 1, [([0], 1, True, False), ([1], 1, True, False), ([2], 1, True, True)]),
            (1, 4, [([0], 1, True, True)]),
            (3, 4, [([0, 1, 2], 3, True, True)]),
            (4, 4, [([0, 1, 2, 3], 4, True, True)]),
            (0, 4, []),
        ],
    )
    def test_windows(self, count: int, size: int, expected: Any) -> None:
        assert read(count, size) == expected

    def test_a_carried_window_keeps_the_size_it_began_with(self) -> None:
        # Its first losses were divided by 4; three batches of it are from the pass before.
        assert read(1, 4, carried=3) == [([0], 4, True, True)]
        assert read(3, 4, carried=2) == [([0, 1], 4, True, False), ([2], 1, True, True)]
        # The pass ends before it is full, and it is closed for good.
        assert read(1, 4, carried=1) == [([0], 4, True, True)]


class TestCarry:
    def test_a_short_window_is_left_open(self) -> None:
        reader = WindowReader(PreparedLoader([0, 1, 2]), 2, remainder="carry")
        windows = [(w.batches, w.size, w.closes, w.is_last) for w in reader]
        assert windows == [([0, 1], 2, True, False), ([2], 2, False, True)]
        assert reader.carried == 1

    def test_over_passes(self) -> None:
        carried, seen = 0, []
        for _ in range(4):
            reader = WindowReader(PreparedLoader([0, 1, 2]), 4, remainder="carry", carried=carried)
            seen.append([(len(w.batches), w.closes) for w in reader])
            carried = reader.carried
        assert seen == [[(3, False)], [(1, True), (2, False)], [(2, True), (1, False)], [(3, True)]]
        assert carried == 0

    def test_a_window_longer_than_several_passes(self) -> None:
        carried = 0
        for expected in (1, 2, 0, 1):
            reader = WindowReader(PreparedLoader([0]), 3, remainder="carry", carried=carried)
            (window,) = reader
            carried = reader.carried
            assert (carried, window.closes, window.size, window.is_last) == (expected, expected == 0, 3, True)


class TestDrop:
    @pytest.mark.parametrize(
        ("count", "size", "expected"),
        [
            (4, 2, [([0, 1], 2, True, False), ([2, 3], 2, True, True)]),
            (5, 2, [([0, 1], 2, True, False), ([2, 3], 2, True, True)]),
            (7, 4, [([0, 1, 2, 3], 4, True, True)]),
            (3, 4, []),
            (3, 1, [([0], 1, True, False), ([1], 1, True, False), ([2], 1, True, True)]),
        ],
    )
    def test_windows(self, count: int, size: int, expected: Any) -> None:
        assert read(count, size, remainder="drop") == expected


@pytest.mark.parametrize("remainder", ["flush", "carry", "drop"])
@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("count", range(12))
def test_every_remainder_keeps_the_order_and_marks_one_end(count: int, size: int, remainder: Remainder) -> None:
    windows = read(count, size, remainder=remainder)
    flat = [batch for window in windows for batch in window[0]]
    kept = count - count % size if remainder == "drop" else count
    assert flat == list(range(kept))
    assert [window[3] for window in windows] == [False] * (len(windows) - 1) + [True] * bool(windows)
    assert all(len(window[0]) == size for window in windows[:-1])


@pytest.mark.parametrize("limit", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_limit_is_as_if_the_data_ended_there(size: int, limit: int) -> None:
    for remainder in ("flush", "carry", "drop"):
        assert read(6, size, limit=limit, remainder=remainder) == read(min(limit, 6), size, remainder=remainder)


def counted(log: list[int], count: int) -> Iterator[int]:
    for index in range(count):
        log.append(index)
        yield index


def test_fetched_before_it_is_given_and_one_beyond() -> None:
    log: list[int] = []
    reader = iter(WindowReader(PreparedLoader(counted(log, 5)), 2))
    next(reader)
    assert log == [0, 1, 2]
    next(reader)
    assert log == [0, 1, 2, 3, 4]


def test_a_rest_that_is_dropped_is_seen_before_the_last_window() -> None:
    log: list[int] = []
    reader = iter(WindowReader(PreparedLoader(counted(log, 3)), 2, remainder="drop"))
    window = next(reader)
    assert (window.batches, window.is_last, log) == ([0, 1], True, [0, 1, 2])


def test_not_one_batch_beyond_the_limit() -> None:
    log: list[int] = []
    reader = WindowReader(PreparedLoader(counted(log, 100)), 2, limit=3)
    assert [window.batches for window in reader] == [[0, 1], [2]]
    assert log == [0, 1, 2]
    assert reader.num_fetched == 3


def test_waiting_is_measured() -> None:
    def slow() -> Iterator[int]:
        for index in range(3):
            time.sleep(0.01)
            yield index

    reader = WindowReader(PreparedLoader(slow()), 1)
    for _ in reader:
        time.sleep(0.02)  # not waiting
    assert 0.03 <= reader.wait_seconds < 0.06


def test_a_stop_iteration_of_the_body_is_not_the_end_of_the_data() -> None:
    def use(window: Window) -> None:
        if window.batches == [1]:
            raise StopIteration("from the body")

    with pytest.raises(StopIteration, match="from the body"):
        for window in WindowReader(PreparedLoader([0, 1, 2]), 1):
            use(window)


class Short(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index >= 3:
            raise StopIteration
        return torch.ones(1)


class TestCheckLength:
    def test_a_pass_that_was_cut_short(self) -> None:
        message = r"the loader ended after 3 of its 6 batches. Its dataset or collate function raised StopIter"
        with pytest.raises(DataError, match=message):
            list(WindowReader(PreparedLoader(DataLoader(Short())), 2))
        with pytest.raises(DataError, match=message):
            list(WindowReader(PreparedLoader(DataLoader(Short(), shuffle=False)), 1, limit=5))

    def test_a_pass_that_was_meant_to_end(self) -> None:
        assert len(list(WindowReader(PreparedLoader(DataLoader(Short())), 1, limit=3))) == 3

    @pytest.mark.parametrize("num_fetched", [6, 7])
    def test_a_whole_pass(self, num_fetched: int) -> None:
        check_length(PreparedLoader(DataLoader(Short())), num_fetched, None)

    def test_lengths_that_promise_nothing(self) -> None:
        class Estimate(list[int]):
            def __len__(self) -> int:
                return 10

        class Sampler(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return iter([0, 1])

            def __len__(self) -> int:
                return 10

        for loader in (Estimate(), DataLoader(Short(), sampler=Sampler()), (x for x in range(3))):
            check_length(PreparedLoader(loader), 2, None)
