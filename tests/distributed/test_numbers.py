"""Tensors as plain numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopwright.distributed.numbers import stack_wide, to_numbers

CPU = torch.device("cpu")


def test_order_kinds_and_every_digit_are_kept() -> None:
    values = {
        "float": torch.tensor(0.1, dtype=torch.float64, requires_grad=True),
        "count": torch.tensor(2**60 + 1),
        "python": 3,
        "half": torch.tensor([[1.5]], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "nothing": None,
        "small": torch.tensor(7, dtype=torch.uint8),
    }
    numbers = to_numbers(values)
    assert list(numbers.items()) == [
        ("float", 0.1), ("count", 2**60 + 1), ("python", 3), ("half", 1.5), ("flag", 1), ("small", 7),
    ]  # fmt: skip
    assert [type(number) for number in numbers.values()] == [float, int, int, float, int, int]


def test_nothing_gives_nothing() -> None:
    assert to_numbers({}) == {}


@pytest.mark.parametrize(
    ("values", "expected", "dtype"),
    [
        ([1, 2], [1, 2], torch.int64),
        ([True, False], [1, 0], torch.int64),
        ([1, 0.1], [1, 0.1], torch.float64),
        ([torch.tensor(0.5, dtype=torch.float16), 0.1], [0.5, 0.1], torch.float64),
        ([torch.tensor(True), torch.tensor(2**60 + 1)], [1, 2**60 + 1], torch.int64),
        ([torch.tensor(3), 2**60 + 1], [3, 2**60 + 1], torch.int64),
        ([torch.tensor(3), torch.tensor(0.5)], [3.0, 0.5], torch.float64),
    ],
)
def test_stacked_in_64_bits(values: list[Any], expected: list[Any], dtype: torch.dtype) -> None:
    stacked = stack_wide(values, CPU)
    assert (stacked.tolist(), stacked.dtype) == (expected, dtype)
