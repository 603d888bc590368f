"""Nested data. F: facts of semantics about Accelerate."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.distributed.nested import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_device,
    flatten,
    honor_type,
    is_namedtuple,
    listify,
    map_leaves,
    named_leaves,
    named_tensors,
    recursively_apply,
    slice_tensors,
)

Pair = namedtuple("Pair", "left right")


class Own:
    """A user's object with a tensor inside."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1, dtype=torch.float16)


def test_f29_halves_become_fp32_and_the_rest_stays() -> None:
    own = Own()
    data: dict[str, Any] = {
        "a": torch.ones(1, dtype=torch.float16),
        "b": [torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)],
        "c": Pair(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)),
        "d": "text",
        "e": (None, True, own),
    }
    out = convert_to_fp32(data)
    assert out["a"].dtype is torch.float32
    assert [t.dtype for t in out["b"]] == [torch.float32, torch.int64]
    assert type(out["c"]) is Pair
    assert [t.dtype for t in out["c"]] == [torch.float64, torch.float32]
    assert out["b"][1] is data["b"][1]
    assert (out["d"], out["e"]) == ("text", (None, True, own))
    assert own.tensor.dtype is torch.float16
    assert data["a"].dtype is torch.float16


def test_decorated_functions_give_fp32() -> None:
    @convert_outputs_to_fp32
    def forward(value: float) -> tuple[Tensor, str]:
        """Half."""
        return torch.tensor(value, dtype=torch.float16), "text"

    out = forward(0.5)
    assert (out[0].dtype, out[0].item(), out[1]) == (torch.float32, 0.5, "text")
    assert (forward.__name__, forward.__doc__) == ("forward", "Half.")


def test_types_are_kept() -> None:
    assert honor_type([1], (2, 3)) == [2, 3]
    assert honor_type((1,), [2, 3]) == (2, 3)
    assert honor_type(Pair(1, 2), [3, 4]) == Pair(3, 4)
    assert is_namedtuple(Pair(1, 2)) and not is_namedtuple((1, 2))
    out = recursively_apply(lambda t, by, plus=0: t * by + plus, OrderedDict(a=torch.ones(1)), 3, plus=1)
    assert type(out) is OrderedDict
    assert out["a"].item() == 4


def test_other_leaves_stay_or_are_an_error() -> None:
    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    assert recursively_apply(double, [1, "a"]) == [1, "a"]
    assert recursively_apply(double, [1, "a"], test_type=lambda v: isinstance(v, int)) == [2, "a"]
    with pytest.raises(TypeError, match=r"double got a str \('a'\)\. Expected tensors, or tuples, lists and mappings"):
        recursively_apply(double, (torch.ones(1), "a"), error_on_other_type=True)
    with pytest.raises(TypeError, match=r"^scale got a int \(1\)\. Expected what callable accepts"):
        recursively_apply(double, [1], test_type=callable, error_on_other_type=True, operation="scale")


def test_concatenate() -> None:
    one = {"a": (torch.ones(1, 2), [torch.zeros(2)])}
    joined = concatenate([one, one, one])
    assert joined["a"][0].shape == (3, 2)
    assert joined["a"][1][0].tolist() == [0] * 6
    assert concatenate([torch.ones(1, 2)] * 2, dim=1).shape == (1, 4)
    with pytest.raises(TypeError, match=r"concatenate got a str\. Expected tensors"):
        concatenate([["a"], ["b"]])


def test_slicing_and_reading() -> None:
    data = {"a": [torch.arange(4)], "b": torch.ones(2, dtype=torch.bfloat16)}
    assert listify(slice_tensors(data, slice(1, 3))) == {"a": [[1, 2]], "b": [1.0]}
    assert listify([torch.tensor(3), "text"]) == [3, "text"]
    with pytest.raises(TypeError, match=r"slice_tensors got a int \(3\) at \[0\]\. Expected tensors, or"):
        slice_tensors([3], slice(0, 1))


def test_leaves_are_named_by_how_they_are_reached() -> None:
    @dataclass
    class Sample:
        x: Any
        words: list[str]

    data = {"a": (1, [2]), "b": Sample(torch.ones(1), ["one", "two"]), "c": "text", "d": []}
    found = dict(named_leaves(data, "batch"))
    assert list(found) == ["batch['a'][0]", "batch['a'][1][0]", "batch['b'].x", "batch['b'].words", "batch['c']"]
    assert found["batch['b'].words"] == ["one", "two"]
    assert [name for name, _ in named_tensors(data)] == ["['b'].x"]
    assert list(named_leaves(3, "n")) == [("n", 3)]


def test_the_first_tensors_device() -> None:
    assert find_device({"a": ["text", (3, torch.ones(1, device="meta"))]}) == torch.device("meta")
    assert find_device(["text"]) is None


@dataclass
class Batch:
    """A user's batch, with a field that is made from another one."""

    x: Any
    more: Any = None
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = int(self.x.sum()) if isinstance(self.x, Tensor) else 0


def test_leaves_of_dataclasses_are_changed_with_their_positions() -> None:
    data = {"b": Batch(torch.arange(3), Pair(1, [2])), 0: "text"}
    seen: list[str] = []

    def double(name: str, leaf: Any) -> Any:
        seen.append(name)
        return leaf * 2

    out = map_leaves(data, double, "batch")
    assert seen == ["batch['b'].x", "batch['b'].more[0]", "batch['b'].more[1][0]", "batch[0]"]
    assert out["b"].x.tolist() == [0, 2, 4]
    assert (out["b"].more, out["b"].total, out[0]) == (Pair(2, [4]), 6, "texttext")
    assert data["b"].total == 3  # type: ignore[union-attr]


def test_flat_leaves_are_in_the_order_of_their_positions() -> None:
    data = {"b": [10, 11], "a": Pair(0, {"z": 2, "y": 1})}
    leaves, rebuild = flatten(data)
    assert [leaf for _, leaf in leaves] == [0, 1, 2, 10, 11]
    assert [name for name, _ in leaves] == ["['a'][0]", "['a'][1]['y']", "['a'][1]['z']", "['b'][0]", "['b'][1]"]
    out = rebuild([leaf + 100 for _, leaf in leaves])
    assert out == {"b": [110, 111], "a": Pair(100, {"z": 102, "y": 101})}
    assert list(out) == ["b", "a"]
    assert list(out["a"].right) == ["z", "y"]
    assert flatten(3)[0] == [("", 3)]
    assert flatten([])[1]([]) == []


def test_dataclasses_are_joined_and_sliced() -> None:
    joined = concatenate(
        [Batch(torch.tensor([1]), {"m": torch.tensor([2])}), Batch(torch.tensor([3]), {"m": torch.ones(2)})]
    )
    assert joined.x.tolist() == [1, 3]
    assert joined.more["m"].tolist() == [2, 1, 1]
    assert joined.total == 4
    assert slice_tensors(joined, slice(1, 2)).x.tolist() == [3]
    with pytest.raises(TypeError, match=r"slice_tensors got a NoneType \(None\) at \.more\. Expected tensors"):
        slice_tensors(Batch(torch.ones(1)), slice(1))
