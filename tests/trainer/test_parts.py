"""Batches cut into parts, and outputs put together again."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from loopwright.data.sizes import find_batch_size
from loopwright.distributed.errors import DataError
from loopwright.trainer.parts import count_rows, cut, extent_of, joined


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    values: Tensor
    texts: list[str]


def test_parts_hold_all_samples_in_order() -> None:
    batch = {
        "pair": Pair(torch.arange(5), np.arange(10).reshape(5, 2)),
        "record": Record(torch.arange(5.0), list("abcde")),
        "texts": tuple("abcde"),
        "numbers": [1, 2, 3, 4, 5],
        "mappings": [{"a": index} for index in range(5)],
        "scale": torch.tensor(2.0),
        "name": "five",
        "nothing": None,
        "short": [1, 2],
    }
    parts = cut(batch, 5, 2)
    assert [(part.samples, part.share) for part in parts] == [(2, 0.4), (2, 0.4), (1, 0.2)]
    second = parts[1].batch
    assert isinstance(second["pair"], Pair)
    assert second["pair"].first.tolist() == [2, 3]
    assert second["pair"].second.tolist() == [[4, 5], [6, 7]]
    assert second["record"].values.tolist() == [2, 3]
    assert (second["record"].texts, second["texts"]) == (["c", "d"], ("c", "d"))
    assert (second["numbers"], second["mappings"]) == ([3, 4], [{"a": 2}, {"a": 3}])
    assert (second["scale"].item(), second["name"], second["nothing"], second["short"]) == (2.0, "five", None, [1, 2])
    assert [part.batch["texts"] for part in parts] == [("a", "b"), ("c", "d"), ("e",)]


def test_parts_are_as_large_as_each_other() -> None:
    assert [part.samples for part in cut(torch.ones(10), 10, 4)] == [4, 3, 3]
    assert [part.samples for part in cut(torch.ones(10), 10, 9)] == [5, 5]
    assert [part.samples for part in cut(torch.ones(3), 3, 1)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.ones(2), {1, 2}], r"batch\[1\] is a set"),
        ({"x": torch.ones(2), "y": torch.eye(2).to_sparse()}, r"batch\['y'\] is a Tensor"),
        ([torch.ones(2), pack_sequence([torch.ones(1), torch.ones(1)])], r"batch\[1\] is a PackedSequence"),
    ],
)
def test_what_can_not_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        cut(batch, 2, 1)


def test_rows() -> None:
    assert count_rows([torch.ones(3, 2), torch.ones(3)], find_batch_size) == 3
    with pytest.raises(DataError, match="nothing in the batch has a first dimension"):
        count_rows([1, 2.0], find_batch_size)
    with pytest.raises(DataError, match="tells 4 samples, and the tensors' first dimension is 3"):
        count_rows(torch.ones(3), lambda batch: 4)


def test_extents() -> None:
    kind, sizes = extent_of([torch.ones(3, 2), ["ab", "cde"], 1, "x"]) or ((), ())
    assert sizes == (3, 2, 2, 3, 1)
    other, larger = extent_of([torch.ones(3, 5), ["ab", "cde", ""], 7, "yy"]) or ((), ())
    assert (other, larger) == (kind, (3, 5, 3, 3, 2))
    assert (extent_of([torch.ones(3, 2, 1), ["ab"], 1, "x"]) or ((), ()))[0] != kind
    assert extent_of([torch.ones(3), object()]) is None


def test_outputs_are_those_of_the_whole_batch() -> None:
    parts = cut(torch.ones(3), 3, 2)
    ones = torch.ones(())
    assert joined([None, None], parts) is None
    assert joined([ones, 4 * ones], parts).item() == pytest.approx(2)
    assert joined([(ones, 2), (4 * ones, 1)], parts) == (5, 3)
    assert joined([None, (4 * ones, 1)], parts) == (4, 1)
    found = joined(
        [
            {"loss": ones, "rows": torch.ones(2, 1), "number": 1.0, "name": "a", "more": 1},
            {"loss": 4 * ones, "rows": torch.zeros(1, 1), "number": 4.0, "name": "b"},
        ],
        parts,
    )
    assert found["loss"].item() == found["number"] == pytest.approx(2)
    assert found["rows"].tolist() == [[1], [1], [0]]
    assert found["name"] == ["a", "b"]
    assert "more" not in found
