"""Batches go to the device, the next one while the present one is used: the order of copies, by a pretended stream."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from loopwright.data.loader import PreparedLoader
from loopwright.data.transfer import Transfer, _can_go_ahead, has_streams
from loopwright.data.window import WindowReader

from .pretend_stream import PretendStream, number

CPU = torch.device("cpu")
ONE = torch.ones(1)


class TestWithoutStreams:
    @pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xla"])
    def test_devices_that_have_none(self, kind: str) -> None:
        assert not has_streams(torch.device(kind))

    @pytest.mark.parametrize("device", [None, CPU])
    def test_nothing_moves_batches_that_stay(self, device: torch.device | None) -> None:
        loader = PreparedLoader([1, 2], device=device)
        assert loader.transfer() is None
        assert WindowReader(loader, 1).transfer is None

    def test_each_batch_is_moved_in_its_turn(self) -> None:
        stream = PretendStream()
        first, second = stream.batches(1, 2)
        Transfer(CPU).next({"x": first}, [second])
        assert stream.log == ["copy 1"]

    def test_a_real_device(self) -> None:
        loader = PreparedLoader([(ONE, "a"), (ONE, "b")], device=torch.device("meta"))
        assert [(x.device.type, name) for x, name in loader] == [("meta", "a"), ("meta", "b")]
        reader = WindowReader(loader, 2)
        (window,) = reader
        assert [reader.on_device(window, position)[0].device.type for position in (0, 1)] == ["meta", "meta"]


class TestTheNextOneGoesAhead:
    def test_before_the_present_one_is_used(self) -> None:
        stream = PretendStream()
        first, second, third = stream.batches(1, 2, 3)
        transfer: Any = Transfer(CPU, side=stream)  # type: ignore[arg-type]
        transfer.next(first, [second, third])
        assert stream.log == ["copy 1", "ahead 2"]
        moved = transfer.next(second, [third])
        assert (type(moved), number(moved)) == (Tensor, 2)
        assert stream.log[2:] == ["take 2", "ahead 3"]
        assert number(transfer.next(third, [])) == 3
        assert stream.log[4:] == ["take 3"]

    def test_another_batch_than_the_one_announced(self) -> None:
        stream = PretendStream()
        first, second, third = stream.batches(1, 2, 3)
        transfer: Any = Transfer(CPU, side=stream)  # type: ignore[arg-type]
        transfer.next(first, [second])
        assert number(transfer.next(third, [])) == 3
        assert stream.log == ["copy 1", "ahead 2", "copy 3"]

    def test_what_cannot_be_moved_fails_in_its_own_turn(self) -> None:
        stream = PretendStream()
        first, second = stream.batches(1, 2, fail=2)
        transfer: Any = Transfer(CPU, side=stream)  # type: ignore[arg-type]
        assert number(transfer.next(first, [second])) == 1
        with pytest.raises(ValueError, match="batch 2 can't be moved"):
            transfer.next(second, [])
        assert stream.log == ["copy 1", "ahead 2", "copy 2"]

    @pytest.mark.parametrize("lookahead", [1, 3])
    def test_a_prepared_loader(self, monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
        stream = PretendStream()
        stream.serve(monkeypatch)
        for batch in PreparedLoader(stream.batches(1, 2, 3), lookahead=lookahead):
            stream.log.append(f"use {number(batch)}")
        assert stream.log == ["copy 1", "ahead 2", "use 1", "take 2", "ahead 3", "use 2", "take 3", "use 3"]

    def test_what_moves_by_code_of_its_own_waits_for_its_turn(self) -> None:
        """It may draw random numbers or compute: not before the batch in front is done with."""
        stream = PretendStream()

        class Own:
            def __init__(self, x: Any) -> None:
                self.x = x

            def to(self, device: Any) -> Any:
                return Own(self.x.to(device))

        first, second = map(Own, stream.batches(1, 2))
        transfer: Any = Transfer(CPU, side=stream)  # type: ignore[arg-type]
        transfer.next(first, [second])
        stream.log.append("use 1")
        assert number(transfer.next(second, [])) == 2
        assert stream.log == ["copy 1", "use 1", "copy 2"]


@dataclass
class Sample:
    x: Any
    y: Any = None


@dataclass
class Computing:
    x: Tensor
    double: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.x * 2


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ONE, True),
        ((ONE, [ONE, {"x": ONE, "name": "a", "n": 3, "none": None}]), True),
        (Pair(ONE, ONE), True),
        (UserDict({"x": ONE}), True),
        (Sample(ONE, (ONE, "a")), True),
        ([], True),
        (Computing(ONE), False),
        (Sample(nn.Identity()), False),
        ({"x": [pack_sequence([ONE])]}, False),
        ((ONE, torch.eye(2).to_sparse()), False),
        (torch.nested.nested_tensor([ONE, ONE], layout=torch.jagged), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_go_ahead(batch: Any, expected: bool) -> None:
    assert _can_go_ahead(batch) is expected
