"""Small values from every process to every process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright.distributed import exchange as exchanges
from loopwright.distributed import slots
from loopwright.distributed.exchange import broadcast_encoded, exchange, start_vector
from loopwright.distributed.operations import broadcast_object_list, gather, gather_object, wait_for_everyone
from loopwright.distributed.shared import SharedMemory
from loopwright.distributed.slots import Channel, GroupCarrier

VALUES = [
    None, True, 0, 10**40, -(2**63), 0.1, math.inf, -math.inf, 5e-324, "", "ünï\u2028code", [], {},
    {"a": [1, {"b": [None, 2.5]}], "": "x"},
]  # fmt: skip


CARRIERS = ("memory", "group")


@contextmanager
def carried_by(carrier: str) -> Iterator[Callable[[], list[int]]]:
    """A context with a new channel; gives what counts the messages in it, and their further rounds, by their bytes."""
    sizes: list[int] = []
    plain, group = slots.gather_into, dist.group.WORLD
    before = slots.channel()
    made = slots._channels[group] = slots._open_channel() if carrier == "memory" else Channel(GroupCarrier())
    assert isinstance(made._carrier, SharedMemory) == (carrier == "memory")

    def counting(output: Any, tensor: Any, async_op: bool = False) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return plain(output, tensor, async_op)

    slots.gather_into = exchanges.gather_into = counting  # type: ignore[assignment]
    try:
        yield lambda: [0] * made.num_sent + sizes if carrier == "memory" else list(sizes)
    finally:
        slots.gather_into = exchanges.gather_into = plain
        slots._channels[group] = before


def test_one_process_has_its_own_value() -> None:
    assert [exchange(value) for value in VALUES] == [[value] for value in VALUES]
    assert math.isnan(exchange(math.nan)[0])
    assert exchange((1, (2,))) == [[1, [2]]]
    assert start_vector([1.0, 2]).read() == [(1.0, 2.0)]
    assert start_vector([]).read() == [()]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: 2}, r"exchange got what can't be sent.*process 0: TypeError: the key 1 is of type int"),
        ([{"a": ({None: 1},)}], r"the key None is of type NoneType"),
        ({"a": {1, 2}}, r"Object of type set is not JSON serializable"),
    ],
)
def test_other_values_are_an_error(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        exchange(value)


def _exchange_values(carrier: str) -> Any:
    r = dist.get_rank()
    with carried_by(carrier) as sizes:
        kept = all(exchange([r, value]) == [[0, value], [1, value]] for value in VALUES)
        num_normal = len(sizes())
        nan = exchange({"x": math.nan} if r else math.nan)
        long = [exchange("x" * (5000 if r else 1)) for _ in range(2)]
        num_long = len(sizes()) - num_normal - 1
        longest = exchange("y" * 200_000)
        num_longest = len(sizes()) - num_normal - 1 - num_long
        after = exchange(r)
        try:
            exchange({1: 2} if r else {"1": 2})
        except TypeError as error:
            refusal = str(error)
    return (
        kept, num_normal, math.isnan(nan[0]) and math.isnan(nan[1]["x"]),
        [[len(text) for text in texts] for texts in long], num_long,
        [len(text) for text in longest], num_longest, after, sizes()[-1], refusal,
    )  # fmt: skip


@pytest.mark.parametrize("carrier", CARRIERS)
def test_values_arrive_in_one_collective_each(two_processes: Any, carrier: str) -> None:
    first, second = two_processes(_exchange_values, carrier)
    assert first == second
    kept, num_normal, is_nan, long, num_long, longest, num_longest, after, last_size, refusal = first
    assert kept
    assert is_nan
    assert num_normal == len(VALUES)
    # A new longest one takes a second collective, once; in memory there is room for it from the beginning.
    assert (long, num_long) == ([[1, 5000]] * 2, 3 if carrier == "group" else 2)
    assert (longest, num_longest, after) == ([200_000] * 2, 2, [0, 1])
    assert carrier == "memory" or last_size <= 16 * 1024  # one huge value does not make all later ones as large
    assert "process 1: TypeError: the key 1" in refusal


def _vectors(carrier: str) -> Any:
    r = dist.get_rank()
    with carried_by(carrier) as sizes:
        pending = [start_vector([r, step, math.inf if r else -0.5]) for step in range(3)]
        between = exchange(r)
        read = [each.read() for each in reversed(pending)]
        again, num_sent = pending[0].read(), len(sizes())
        wide = start_vector([float(r)] * 20).read()
        try:
            start_vector([1.0] * (1 + r), operation="decide").read()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
    return read, again == read[-1], between, num_sent, wide == [(0.0,) * 20, (1.0,) * 20], text


@pytest.mark.parametrize("carrier", CARRIERS)
def test_vectors_are_read_when_they_are_wanted(two_processes: Any, carrier: str) -> None:
    first, second = two_processes(_vectors, carrier)
    assert first == second
    read, is_same, between, num_collectives, is_wide, text = first
    assert read == [[(0.0, step, -0.5), (1.0, step, math.inf)] for step in (2.0, 1.0, 0.0)]
    assert is_same
    assert is_wide
    assert (between, num_collectives) == ([0, 1], 4)
    assert (
        text == "ShapeMismatchError: decide: the processes sent [1, 2] numbers. Each has to send as many as the others."
    )


def _meet(*pairs: tuple[Callable[[], Any], Callable[[], Any]]) -> list[str]:
    """Let process 0 make the first call of each pair while process 1 makes the second; what each raises."""
    texts = []
    for calls in pairs:
        try:
            calls[dist.get_rank()]()
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def _different_operations(carrier: str) -> Any:
    with carried_by(carrier):
        return _meet_in_pairs(dist.get_rank())


def _meet_in_pairs(r: int) -> Any:
    texts = _meet(
        (lambda: wait_for_everyone(), lambda: gather(torch.ones(3))),
        (lambda: exchange(1), lambda: gather_object([1])),
        (lambda: start_vector([1.0], "agree").read(), lambda: exchange("x" * 5000)),
        (lambda: start_vector([1.0], "agree").read(), lambda: start_vector([1.0, 2.0], "settle").read()),
        (lambda: wait_for_everyone(), lambda: start_vector([1.0], "agree").read()),
        (lambda: broadcast_object_list([1]), lambda: start_vector([1.0], "agree").read()),
        (lambda: exchange(1, "x" * 60), lambda: exchange(1, "x" * 61)),
    )
    exchange("x" * 5000)  # slots are larger from here on, those of vectors as well
    texts += _meet(
        (lambda: start_vector([1.0], "agree").read(), lambda: exchange(1)),
        (lambda: broadcast_object_list([1, 2], 0), lambda: broadcast_object_list([1, 2], 1)),
    )
    return texts, start_vector([r]).read(), exchange(r)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_different_operations_that_meet_are_an_error_on_every_process(two_processes: Any, carrier: str) -> None:
    first, second = two_processes(_different_operations, carrier)
    assert first[0] == second[0]
    texts, vectors, after = first
    meetings = [
        ("wait_for_everyone", "gather"),
        ("exchange", "gather_object"),
        ("agree", "exchange"),
        ("agree", "settle"),
        ("wait_for_everyone", "agree"),
        ("broadcast_object_list(from_process=0)", "agree"),
        ("x" * 48, "x" * 48),
        ("agree", "exchange"),
        ("broadcast_object_list(from_process=0)", "broadcast_object_list(from_process=1)"),
    ]
    for text, (one, other) in zip(texts, meetings, strict=True):
        assert text.startswith(
            f"DistributedError: the processes are in different operations: process 0: {one}; process 1: {other}. All "
        )
    assert (vectors, after) == ([(0.0,), (1.0,)], [0, 1])  # the group is as it was


def _broadcast(carrier: str, length: int) -> bool:
    payload = bytes(range(256)) * (length // 256 + 1)
    with carried_by(carrier) as sizes:
        arrived = broadcast_encoded(lambda: payload[:length], 1, "tell")
        return arrived == payload[:length] and len(sizes()) == 1


@pytest.mark.parametrize("carrier", CARRIERS)
def test_bytes_of_any_length_arrive_from_one_process(two_processes: Any, carrier: str) -> None:
    for length in (0, 1, 900, 20_000):
        assert two_processes(_broadcast, carrier, length) == [True, True]
