"""Dealing each process its share of a list. F: facts of semantics about Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopwright.distributed.errors import DataError
from loopwright.distributed.splitting import share_of


def shares(inputs: Any, count: int, apply_padding: bool = False) -> list[Any]:
    return [share_of(inputs, index, count, apply_padding) for index in range(count)]


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (3, 2, [[0, 1], [2]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (7, 2, [[0, 1, 2, 3], [4, 5, 6]]),
        (1, 2, [[0], []]),
        (0, 2, [[], []]),
        (2, 3, [[0], [1], []]),
    ],
)
def test_f31_the_first_shares_are_longer_by_one(length: int, count: int, expected: list[list[int]]) -> None:
    inputs = list(range(length))
    assert shares(inputs, count) == expected
    assert shares(tuple(inputs), count) == [tuple(share) for share in expected]
    assert [share.tolist() for share in shares(torch.arange(length), count)] == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(3, [[0, 1], [2, 2]]), (5, [[0, 1, 2], [3, 4, 4]]), (1, [[0], [0]]), (0, [[], []]), (4, [[0, 1], [2, 3]])],
)
def test_f32_shares_are_filled_up_by_the_last_item(length: int, expected: list[list[int]]) -> None:
    assert shares(list(range(length)), 2, apply_padding=True) == expected
    assert shares(tuple(range(length)), 2, apply_padding=True) == [tuple(share) for share in expected]
    assert [share.tolist() for share in shares(torch.arange(length), 2, apply_padding=True)] == expected


def test_f32_mappings_are_split_by_key_and_not_changed() -> None:
    inputs = {"a": [1, 2, 3], "b": torch.arange(3)}
    first, second = shares(inputs, 2)
    assert (first["a"], first["b"].tolist(), second["a"], second["b"].tolist()) == ([1, 2], [0, 1], [3], [2])
    assert inputs["a"] == [1, 2, 3]
    with pytest.raises(DataError, match=r"the values differ in length: \{'a': 1, 'b': 2\}"):
        share_of({"a": [1], "b": [1, 2]}, 0, 2)


def test_f32_f33_other_inputs() -> None:
    class Table:
        """A stand-in for `datasets.Dataset`, which is read by `select`."""

        def __len__(self) -> int:
            return 3

        def select(self, indices: list[int]) -> list[int]:
            return indices

    assert shares(Table(), 2, apply_padding=True) == [[0, 1], [2, 2]]
    assert shares("text", 2) == ["text", "text"]
    inputs = [1, 2]
    assert share_of(inputs, 0, 1) is inputs
