"""How many samples a batch holds."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.data.sizes import AmbiguousBatchSizeError, find_batch_size

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Any
    y: Any


def t(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (t(4), 4), (t(4, 3), 4), (t(0, 3), 0), (t(), None),
        ((t(4), t(4, 2)), 4), ([t(4), t(4)], 4), ((t(4), t()), 4), ((t(), t()), None), ((t(4),), 4),
        ((t(4), t(4), t(4)), 4),
        ({"a": t(4, 3), "b": t(4)}, 4), (OrderedDict(a=t(4)), 4), ({}, None), ([], None), ((), None),
        ({"a": {"b": [t(4), {"c": t(4, 1)}]}}, 4), (Pair(t(4), t(4)), 4), (Sample(t(4), t(4)), 4),
        (np.zeros((4, 2)), 4), ((np.zeros(4), t(4)), 4), (np.float32(1), None),
        (["a", "b", "c"], 3), ({"text": ["a", "b"], "x": t(2)}, 2), ({"text": ["aaaa", "b"]}, 2), ([b"a", b"b"], 2),
        ("text", None), (3, None), (2.5, None), (None, None), ((t(4), None), 4), ((t(4), 3), 4), ((t(4), "name"), 4),
        ([1, 2, 3], None),
    ],
    ids=str,
)  # fmt: skip
def test_sizes(batch: Any, expected: int | None) -> None:
    assert find_batch_size(batch) == expected


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((t(4), t(3)), r"can't be told: batch\[0\] has 4, batch\[1\] has 3. Pass batch_size= to self.log, or override"),
        ({"a": t(4), "b": {"c": t(3)}}, r"batch\['a'\] has 4, batch\['b'\]\['c'\] has 3"),
        (Sample(t(4), [t(3)]), r"batch.x has 4, batch.y\[0\] has 3"),
        ({"text": ["a", "b", "c"], "x": t(2)}, r"batch\['text'\] has 3, batch\['x'\] has 2"),
        ([t(4), t(4), t(5)], r"batch\[2\] has 5"),
    ],
    ids=str,
)
def test_parts_that_disagree(batch: Any, message: str) -> None:
    with pytest.raises(AmbiguousBatchSizeError, match=message):
        find_batch_size(batch)


@pytest.mark.parametrize("values", [(1.0, 6.0)])
def test_the_size_of_a_mapping_is_that_of_its_tensors(values: tuple[float, float]) -> None:
    for make in (
        lambda n: {"a": t(n, 3), "b": t(n)}, lambda n: (t(n, 3), t(n)),
        lambda n: {"names": ["x"] * n, "in": {"a": t(n, 3)}},
    ):  # fmt: skip
        sizes = [find_batch_size(make(n)) for n in (4, 1)]
        assert sizes == [4, 1]
        mean = sum(v * n for v, n in zip(values, sizes, strict=True)) / 5  # type: ignore[operator]
        assert mean == 2.0


def test_batches_of_another_library_count_by_their_mapping() -> None:
    from collections import UserDict

    class Encoding(UserDict):  # type: ignore[type-arg]
        def to(self, device: Any) -> Encoding:
            return self

    assert find_batch_size(Encoding({"ids": t(3, 7), "mask": t(3, 7)})) == 3
