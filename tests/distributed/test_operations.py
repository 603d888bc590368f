"""What processes do with each other's data, in one process. F: facts of semantics about Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError, DataError
from loopwright.distributed.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from loopwright.distributed.splitting import share_of


@pytest.mark.parametrize("operation", [gather, broadcast, reduce, pad_across_processes])
def test_f36_nested_tensors_come_back_as_they_were(operation: Any) -> None:
    data = {"a": torch.arange(3), "b": (torch.tensor(1.5), [torch.ones(2, 2)])}
    out = operation(data)
    assert out["a"].tolist() == [0, 1, 2]
    assert out["b"][0].item() == 1.5
    assert out["b"][1][0].shape == (2, 2)


@pytest.mark.parametrize("operation", [gather, broadcast, reduce, pad_across_processes])
@pytest.mark.parametrize("leaf", ["text", 3, None])
def test_f34_f36_other_leaves_are_an_error(operation: Any, leaf: Any) -> None:
    with pytest.raises(TypeError, match=rf"{operation.__name__} got a {type(leaf).__name__} .*Expected tensors"):
        operation([torch.ones(1), leaf])


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_f35_reduce_gives_new_tensors(reduction: str) -> None:
    tensor = torch.tensor([1, 2])
    out = reduce(tensor, reduction)
    assert out is not tensor
    assert out.tolist() == [1, 2]


def test_f35_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"reduction='meen'\) is unknown\. Did you mean 'mean'\? Accepted: mean, none, sum"
    ):
        reduce(torch.ones(1), "meen")


def test_f37_objects() -> None:
    objects = ["a", {"b": 1}]
    assert gather_object(objects) is objects
    assert broadcast_object_list(objects) is objects
    with pytest.raises(TypeError, match=r"broadcast_object_list got a tuple\. Expected a list"):
        broadcast_object_list(("a",))  # type: ignore[arg-type]
    wait_for_everyone()


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
