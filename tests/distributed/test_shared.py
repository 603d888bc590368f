"""Control messages through the memory of one machine: values, order, and where it can't be had."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright.distributed import group, shared, slots
from loopwright.distributed.errors import PeerFailedError
from loopwright.distributed.exchange import exchange, start_vector
from loopwright.distributed.operations import wait_for_everyone
from loopwright.distributed.shared import MOST_UNDER_WAY, SharedMemory, size_of

MINUTE = timedelta(minutes=1)
LARGEST = 100


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemory, SharedMemory]]:
    """What two processes would have, in one: it has all locks itself."""
    path = Path("memory")
    path.write_bytes(bytes(size_of(2, LARGEST)))
    first, second = (SharedMemory(str(path), index, 2, LARGEST, MINUTE) for index in range(2))
    path.unlink()
    yield first, second


def test_each_message_arrives_whole_and_in_order(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, second = pair
    for number in range(100):
        messages = [bytes([number]) * (number % 7), bytes([number, 1]) * (LARGEST // 2)]
        sent = first.send(messages[0], 0)
        received = second.send(messages[1], 0)
        assert received() == received() == messages
        assert sent() == messages


def test_what_is_sent_is_kept_until_somebody_wants_it(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, second = pair
    received = []
    for number in range(3 * MOST_UNDER_WAY):
        received.append(first.send(bytes([number]), 0))
        second.send(bytes([number, 9]), 0)
    for number in reversed(range(len(received))):
        assert received[number]() == [bytes([number]), bytes([number, 9])]


def test_a_message_that_is_being_written_is_not_there(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, second = pair
    first.send(b"before", 0)
    start = first._start(0, 1)
    for offset in (0, 8, 12, 17, 21):  # in its number, checksum, length and bytes
        found = first._memory[start + offset]
        first._memory[start + offset] = found ^ 1
        assert second._look(0, 1) is None
        first._memory[start + offset] = found
    assert second._look(0, 1) == b"before"
    assert second._look(0, 2) is None


def test_a_message_that_was_overwritten_is_never_taken_for_another(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, second = pair
    first._number = 2 * MOST_UNDER_WAY
    first.send(b"late", 0)
    with pytest.raises(AssertionError, match="message 1 of process 0 was overwritten by 9"):
        second._look(0, 1)


def test_who_has_left_neither_sends_nor_waits(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, _ = pair
    received = first.send(b"", 0)
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer: the processes \[1\] have left"):
        received()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer: the processes \[0\] have left"):
        first.send(b"", 0)


def test_what_arrives_at_the_last_moment_is_in_time(pair: tuple[SharedMemory, SharedMemory]) -> None:
    first, second = pair
    second.send(b"late", 0)
    first._timeout = timedelta(seconds=-1)
    assert first._wait([b"own", None], 1) == [b"own", b"late"]


def test_a_file_that_can_not_be_opened_is_no_memory() -> None:
    assert shared._opened("elsewhere", 0, 2, LARGEST, MINUTE) is None
    Path("short").write_bytes(b"short")
    before = set(os.listdir("/dev/fd"))
    assert shared._opened("short", 0, 2, LARGEST, MINUTE) is None
    assert set(os.listdir("/dev/fd")) == before


def _many_vectors(count: int) -> tuple[int, bool]:
    """Vectors of random lengths, of which a random number is under way, with pauses that differ by process."""
    r, alike, own = dist.get_rank(), random.Random(0), random.Random(dist.get_rank())
    assert isinstance(slots.channel()._carrier, SharedMemory)
    expected: list[list[tuple[float, ...]]] = []
    found: dict[int, list[tuple[float, ...]]] = {}
    pending: dict[int, Any] = {}
    for number in range(count):
        values = [alike.random() for _ in range(alike.randrange(100))]
        expected.append([tuple(each + index for each in values) for index in range(dist.get_world_size())])
        pending[number] = start_vector([each + r for each in values])
        if own.random() < 0.02:
            time.sleep(0.005 * own.random())
        if own.random() < 0.01:
            found.update({each: waiting.read() for each, waiting in reversed(pending.items())})
            pending.clear()
        elif own.random() < 0.8:
            each = own.choice(list(pending))
            found[each] = pending.pop(each).read()
    found.update({each: waiting.read() for each, waiting in pending.items()})
    return len(found), all(found[number] == expected[number] for number in range(count))


def test_many_vectors_arrive_right_whoever_is_slow(two_processes: Any, three_processes: Any) -> None:
    assert two_processes(_many_vectors, 3000) == [(3000, True)] * 2
    assert three_processes(_many_vectors, 1000) == [(1000, True)] * 3


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def _opened_under(kind: int, value: int, index: int) -> tuple[str, int]:
    """What carries messages when this process can't have what it needs, and how many files are open more."""
    before = set(os.listdir("/dev/fd"))
    with limited(kind, value) if group.rank() == index else contextlib.nullcontext():
        made = slots._open_channel()
    name = type(made._carrier).__name__
    del made
    return name, len(set(os.listdir("/dev/fd")) - before)


@pytest.mark.parametrize(
    ("kind", "value", "index"),
    [
        (resource.RLIMIT_FSIZE, 1024, 0),  # there is no room for the file
        (resource.RLIMIT_NOFILE, 3, 1),  # a process can open nothing
        (resource.RLIMIT_FSIZE, 10**9, 0),
    ],
)
def test_where_one_process_can_share_no_memory_none_does(two_processes: Any, kind: int, value: int, index: int) -> None:
    carrier = "SharedMemory" if value == 10**9 else "GroupCarrier"
    before = set(shared._MEMORY_FOLDER.glob("loopwright-*"))
    assert two_processes(_opened_under, kind, value, index) == [(carrier, 0)] * 2
    assert set(shared._MEMORY_FOLDER.glob("loopwright-*")) <= before


def _on_nodes(num_nodes: int) -> tuple[str, list[int], bool]:
    """The group joined anew, as a launcher on so many machines would have it."""
    joined = group.joined_place()
    assert joined is not None
    group.disconnect()
    index = joined.process_index
    local_index, node_index = (index, 0) if num_nodes == 1 else (0, index)
    place = replace(
        joined,
        local_num_processes=2 // num_nodes,
        local_process_index=local_index,
        node_index=node_index,
        num_nodes=num_nodes,
    )
    group.connect(place, torch.device("cpu"), init_method=f"file://{Path(f'meet-{num_nodes}').absolute()}")
    carrier = slots.channel()._carrier
    wait_for_everyone()
    is_gone = not isinstance(carrier, SharedMemory) or os.fstat(carrier._file).st_nlink == 0
    return type(carrier).__name__, exchange(place.node_index), is_gone


def _one_leaves() -> str:
    """Process 1 leaves the group in order, with a message on its way, which nobody reads there."""
    joined = group.joined_place()
    assert joined is not None
    found, pending = "", start_vector([1.0])
    if joined.process_index == 1:
        group.disconnect()
    else:
        pending.read()
        try:
            exchange(1)
        except PeerFailedError as error:
            found = str(error)
        group.disconnect()
    group.connect(joined, torch.device("cpu"), init_method=f"file://{Path('meet-again').absolute()}")
    return found


def test_who_leaves_in_order_lets_nobody_wait(two_processes: Any) -> None:
    found, _ = two_processes(_one_leaves)
    assert "or it has left the group: process 1." in found


def test_machines_share_no_memory(two_processes: Any) -> None:
    assert two_processes(_on_nodes, 2) == [("GroupCarrier", [0, 1], True)] * 2
    assert two_processes(_on_nodes, 1) == [("SharedMemory", [0, 0], True)] * 2  # a file that has no name any more
