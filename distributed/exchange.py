"""Small values from every process to every process, over the CPU.

What is exchanged here is control, not training data: decisions, names, lengths, descriptions. Each call is one
collective, unless a value is longer than any before it. All of them begin with slots of the same size, see `slots.py`:
different operations that meet are an error on every process.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from . import watch
from .group import rank, world_size
from .positions import MEETING
from .slots import FIRST_CAPACITY, SentSlot, channel, control_device, gather_into


def exchange(value: Any, operation: str = "exchange") -> list[Any]:
    """Every process's value, on every process. Collective.

    Args:
        value: None, a boolean, a number (NaN, infinities and integers of any size pass exactly), a text, or lists and
            mappings with texts as keys of these. A tuple arrives as a list.
        operation: what reports call it.
    Returns:
        One value per process, process 0 first.
    Raises:
        TypeError: on every process: one of them has a value of another kind.
        DistributedError: on every process: they are in different operations; shows which.
    """

    def encode() -> bytes:
        _check_keys(value)
        return json.dumps(value, separators=(",", ":")).encode()

    return [json.loads(part) for part in gather_encoded(encode, operation)]


def gather_encoded(encode: Callable[[], bytes], operation: str) -> list[bytes]:
    """Every process's bytes, on every process. Collective.

    Args:
        encode: gives this process's. What it raises is told to all.
        operation: what reports call it.
    Raises:
        TypeError: on every process: `encode` failed on one of them.
    """
    payload, error = _encoded(encode)
    parts = gather_bytes(payload, operation)
    _raise_refusals(operation, dict(enumerate(parts)), error)
    return [part[1:] for part in parts]


def broadcast_encoded(encode: Callable[[], bytes], from_process: int, operation: str) -> bytes:
    """One process's bytes, on every process. Collective.

    Args:
        encode: gives them; called on that process alone. What it raises is told to all.
        from_process: the index of that process.
        operation: what reports call it; of processes that name different sources it has to differ.
    Raises:
        TypeError: on every process: `encode` failed.
    """
    is_source = rank() == from_process
    payload, error = _encoded(encode) if is_source else (b"", None)
    if world_size() > 1:
        with watch.collective(operation):
            payload = _broadcast_bytes(payload, from_process, operation)
    _raise_refusals(operation, {from_process: payload}, error)
    return payload[1:]


def gather_bytes(payload: bytes, operation: str) -> list[bytes]:
    """Every process's bytes, of any lengths, on every process. Collective: one, or two for a new largest length.

    Raises:
        DistributedError: on every process: they are in different operations; shows which.
    """
    if world_size() == 1:
        return [payload]
    with watch.collective(operation):
        way = channel()
        slots = way.send(payload, operation).read()
        # Every process sees the same lengths, and so they agree on a second round and on the next capacity.
        lengths = [slot.length for slot in slots]
        longest = max(lengths)
        if longest <= way.capacity:
            return [slot.payload for slot in slots]
        way.grow(longest)
        return _gather_whole(payload, lengths)


class PendingVector:
    """Numbers on their way from every process; `read` waits for them. Made by `start_vector`."""

    __slots__ = ("_layout", "_operation", "_sent", "_vectors")

    def __init__(self, layout: struct.Struct, operation: str) -> None:
        self._layout = layout
        self._operation = operation
        self._sent: SentSlot | None = None
        self._vectors: list[tuple[float, ...]] = []

    def read(self) -> list[tuple[float, ...]]:
        """Every process's numbers, process 0 first; a second call gives the same. Collective by its start.

        Raises:
            DistributedError: on every process: they are in different operations; shows which.
            ShapeMismatchError: the processes sent different numbers of numbers.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            with watch.collective(self._operation, MEETING):
                self._vectors = sent.read_numbers(self._layout)
        return self._vectors


def start_vector(values: Sequence[float], operation: str = "start_vector") -> PendingVector:
    """Begin to send a few numbers from every process to every process, without waiting. Collective.

    Args:
        values: as many on each process, 120 at most; they travel as float64.
        operation: what reports call it.
    """
    layout = _layout_of(len(values))
    pending = PendingVector(layout, operation)
    if world_size() == 1:
        pending._vectors = [tuple(map(float, values))]
        return pending
    assert layout.size <= FIRST_CAPACITY, f"{operation}: a vector of {len(values)} numbers does not fit into a slot"
    with watch.collective(operation):
        pending._sent = channel().send(layout.pack(*values), operation)
    return pending


@cache
def _layout_of(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}d")


def _gather_whole(payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Every process's payload, in a gather that is as large as the longest of them."""
    size, device = max(lengths), control_device()
    received = bytearray(size * len(lengths))
    target = torch.frombuffer(received, dtype=torch.uint8)  # shares the memory
    output = target.to(device)
    gather_into(output, torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(device))
    if output is not target:
        target.copy_(output)
    return [bytes(received[size * index : size * index + length]) for index, length in enumerate(lengths)]


def _broadcast_bytes(payload: bytes, from_process: int, operation: str) -> bytes:
    """One process's bytes; as for all control messages, the first part travels in slots, in which others send none."""
    slots = channel().send(payload, operation).read()
    first = slots[from_process].payload
    missing = slots[from_process].length - len(first)
    if not missing:
        return first
    rest = bytearray(payload[len(first) :] or bytes(missing))
    return first + bytes(_broadcast_buffer(rest, from_process))


def _broadcast_buffer(buffer: bytearray, from_process: int) -> bytearray:
    target = torch.frombuffer(buffer, dtype=torch.uint8)  # shares the memory
    output = target.to(control_device())
    dist.broadcast(output, from_process)
    if output is not target:
        target.copy_(output)
    return buffer


def _encoded(encode: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    try:
        return b"+" + encode(), None
    except Exception as error:  # noqa: BLE001  (raised on every process, after all were told)
        return b"-" + f"{type(error).__name__}: {error}".encode(errors="replace"), error


def _raise_refusals(operation: str, parts: dict[int, bytes], error: Exception | None) -> None:
    refusals = [f"process {index}: {part[1:].decode()}" for index, part in parts.items() if part[:1] == b"-"]
    if refusals:
        raise TypeError(f"{operation} got what can't be sent to other processes. {'; '.join(refusals)}") from error


def _check_keys(value: Any) -> None:
    """Raises TypeError where a key would arrive as another one."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is of type {type(key).__name__}. Expected texts as keys.")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)
