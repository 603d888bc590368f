"""Moving batches: the same nesting, on another device. The meta device stands for an accelerator."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.distributed.nested import send_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str
    doubled: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


class Tagged(UserDict):  # type: ignore[type-arg]
    """Has an attribute, and a constructor that needs more than items."""

    def __init__(self, items: dict[str, Any], tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Own(MutableMapping[str, Any]):
    """A mapping that keeps its items in an attribute."""

    def __init__(self, tag: str, **items: Any) -> None:
        self.tag = tag
        self.items_of_its_own = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of_its_own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of_its_own[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of_its_own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_its_own)

    def __len__(self) -> int:
        return len(self.items_of_its_own)


class Fixed(dict[str, Any]):
    """A dictionary that can't be changed."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("fixed")


class HasTo:
    def __init__(self) -> None:
        self.where = "cpu"

    def to(self, device: Any) -> HasTo:
        moved = HasTo()
        moved.where = str(device)
        return moved


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("data", "tensors"),
    [
        (one(), lambda d: [d]),
        ([one(), one()], lambda d: d),
        ((one(), 3), lambda d: [d[0]]),
        ({"a": one(), "b": {"c": [one()]}}, lambda d: [d["a"], d["b"]["c"][0]]),
        (OrderedDict(a=one()), lambda d: [d["a"]]),
        (Pair(one(), "y"), lambda d: [d.x]),
        (Sample(one(), "n"), lambda d: [d.x]),
        (Frozen(one()), lambda d: [d.x]),
        (Encoding({"ids": one()}), lambda d: [d["ids"]]),
        (defaultdict(list, a=one()), lambda d: [d["a"]]),
        (MappingProxyType({"a": one()}), lambda d: [d["a"]]),
        (Tagged({"a": one()}, "t"), lambda d: [d["a"]]),
        (Fixed(a=one()), lambda d: [d["a"]]),
        (Own("t", a=[one()]), lambda d: [d["a"][0]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_is_moved_and_every_type_kept(data: Any, tensors: Any) -> None:
    moved = send_to_device(data, META)
    assert type(moved) is type(data)
    assert [tensor.device for tensor in tensors(moved)] == [META] * len(tensors(data))
    assert all(tensor.device.type == "cpu" for tensor in tensors(data))  # the caller's own is as it was


@pytest.mark.parametrize("data", [Tagged({"a": one()}, "t"), Own("t", a=one())])
def test_mappings_keep_what_else_they_know(data: Any) -> None:
    assert send_to_device(data, META).tag == "t"
    assert send_to_device(defaultdict(list, a=one()), META)["b"] == []


def test_a_packed_sequence_moves_itself() -> None:
    """Its batch sizes have to stay on the CPU."""
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = send_to_device({"x": packed}, META)["x"]
    assert (type(moved), moved.data.device, moved.batch_sizes.tolist()) == (type(packed), META, [2, 1, 1])
    assert packed.data.device.type == "cpu"


@pytest.mark.parametrize("data", ["text", b"bytes", 3, 2.5, None, True, object(), {1, 2}])
def test_anything_else_passes(data: Any) -> None:
    assert send_to_device(data, META) is data


def test_objects_that_move_themselves() -> None:
    assert send_to_device({"a": HasTo()}, META)["a"].where == "meta"


def test_modules_are_not_part_of_a_batch() -> None:
    net = nn.Linear(1, 1)
    assert send_to_device([net], META)[0] is net
    assert net.weight.device.type == "cpu"


def test_keys_that_stay() -> None:
    data = {"a": one(), "b": one(), "in": {"b": one()}}
    moved = send_to_device(data, META, skip_keys=["b"])
    assert (moved["a"].device, moved["b"].device.type, moved["in"]["b"].device.type) == (META, "cpu", "cpu")
    assert send_to_device(data, META, skip_keys="a")["a"].device.type == "cpu"
