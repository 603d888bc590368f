from __future__ import annotations

import decimal
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.trackers.values import MetricCleaner, to_number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (7, 7),
        (True, 1),
        (2**63 + 1, 2**63 + 1),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (Fraction(1, 4), 0.25),
        (np.float32(0.1), 0.10000000149011612),
        (np.float64(0.5), 0.5),
        (np.int8(-128), -128),
        (np.int64(2**53 + 1), 2**53 + 1),
        (np.bool_(True), 1),
        (np.array(2.5), 2.5),
        (np.array([[3]]), 3),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[2]]), 2),
        (torch.tensor(2**53 + 1), 2**53 + 1),
        (torch.tensor(True), 1),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(3.0, requires_grad=True), 3.0),
        (torch.nn.Parameter(torch.tensor([4.0])) * 2, 8.0),
        (math.inf, math.inf),
        (torch.tensor(-math.inf), -math.inf),
    ],
)
def test_one_number_is_read(value: Any, expected: float) -> None:
    number = to_number(value)
    assert number == expected
    assert type(number) is type(expected)


def test_nan_stays() -> None:
    numbers = [to_number(value) for value in (math.nan, np.float16("nan"), torch.tensor(math.nan))]
    assert all(isinstance(number, float) and math.isnan(number) for number in numbers)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.5",
        b"1",
        torch.ones(3),
        torch.empty(0),
        torch.ones((), device="meta"),
        torch.tensor(1j),
        1j,
        np.ones(2),
        np.array("text"),
        np.clongdouble(1),
        [1.0],
        {"a": 1.0},
        decimal.Decimal(1),
        object(),
    ],
)
def test_what_is_not_one_number_is_none(value: Any) -> None:
    assert to_number(value) is None


def test_cleaner_warns_once_per_name_and_is_silent_about_none(caplog: pytest.LogCaptureFixture) -> None:
    cleaner = MetricCleaner()
    for _ in range(3):
        assert cleaner.clean({"a": 1.0, "none": None, "text": "x", "many": torch.ones(2, 3), "list": [1]}) == {"a": 1.0}
    rest = "not one number: trackers don't get it. Log a number, or a tensor of one element. This is said once."
    assert [record.getMessage() for record in caplog.records] == [
        f"metric 'text' holds a value of type str, {rest}",
        f"metric 'many' holds a value of type Tensor and shape (2, 3), {rest}",
        f"metric 'list' holds a value of type list, {rest}",
    ]


def test_a_name_that_was_refused_once_is_taken_with_a_number() -> None:
    cleaner = MetricCleaner()
    assert [cleaner.clean({"a": value}) for value in ("x", 2.0)] == [{}, {"a": 2.0}]
