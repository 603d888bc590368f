"""Small values from every process to every process, over the CPU.

What is exchanged here is control, not training data: decisions, names, lengths, descriptions. Each call is one
collective, unless a value is longer than any before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import watch
from .errors import DistributedError, ShapeMismatchError
from .group import rank, world_size

_HEADER_BYTES = 16
"""Before a payload stand its length and the operation that it belongs to, so that two that meet are told apart."""
_FIRST_CAPACITY = 1024 - _HEADER_BYTES
_LARGEST_KEPT = 64 * 1024
"""The capacity, in bytes of payload, up to which a long value makes later calls larger as well."""
_VECTOR_STEP = 8
"""Vectors are filled up to a multiple of this, so that those of slightly different lengths can still be compared."""

# torch's default group has one capacity, which all its processes change at the same call.
_capacities: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


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
        operation: what reports call it.
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
    group = dist.group.WORLD
    capacity = _capacities.get(group, _FIRST_CAPACITY)
    with watch.collective(operation):
        slots = _gather_slots(payload, operation, capacity)
        if len({slot.tag for slot in slots}) > 1:
            _raise_meeting(_gather_slots(operation.encode(), operation, capacity))
        # Every process sees the same lengths, and so they agree on a second round and on the next capacity.
        longest = max(slot.length for slot in slots)
        if longest > capacity:
            slots = _gather_slots(payload, operation, longest)
            _capacities[group] = min(1 << (longest - 1).bit_length(), _LARGEST_KEPT)
    return [slot.payload for slot in slots]


class PendingVector:
    """Numbers on their way from every process; `read` waits for them. Made by `start_vector`."""

    def __init__(self, rows: Tensor, work: Any, operation: str) -> None:
        self._rows = rows
        self._work = work
        self._operation = operation
        self._vectors: list[tuple[float, ...]] | None = None

    def read(self) -> list[tuple[float, ...]]:
        """Every process's numbers, process 0 first; a second call gives the same. Collective by its start.

        Raises:
            ShapeMismatchError: the processes sent different numbers of numbers.
        """
        if self._vectors is None:
            if self._work is not None:
                with watch.collective(self._operation):
                    self._work.wait()
                self._work = None
            rows: list[list[float]] = self._rows.tolist()
            lengths = [int(row[0]) for row in rows]
            if len(set(lengths)) > 1:
                raise ShapeMismatchError(
                    f"{self._operation}: the processes sent {lengths} numbers. Each has to send as many as the others."
                )
            self._vectors = [tuple(row[1 : 1 + lengths[0]]) for row in rows]
        return self._vectors


def start_vector(values: Sequence[float], operation: str = "start_vector") -> PendingVector:
    """Begin to send a few numbers from every process to every process, without waiting. Collective.

    Args:
        values: as many on each process; they travel as float64.
        operation: what reports call it.
    """
    size = -(-(1 + len(values)) // _VECTOR_STEP) * _VECTOR_STEP
    row = torch.zeros(size, dtype=torch.float64)
    row[: 1 + len(values)] = torch.tensor([len(values), *values], dtype=torch.float64)
    if world_size() == 1:
        return PendingVector(row[None], None, operation)
    row = row.to(control_device())
    rows = row.new_empty(world_size(), size)
    with watch.collective(operation):
        work = gather_into(rows.view(-1), row, async_op=True)
    return PendingVector(rows, work, operation)


def gather_into(output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
    """Fill a flat tensor with every process's, one after another: torch's collective under its present name."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return gather(output, tensor, async_op=async_op)


def control_device() -> torch.device:
    """Where small values travel: the CPU, unless the script made a group that has no backend for it. Local."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a group without a backend for the CPU has one for an accelerator"
    return device


@dataclass(frozen=True, slots=True)
class _Slot:
    """What one process sends: a length, the operation's tag, and the payload as far as the capacity goes."""

    length: int
    tag: bytes
    payload: bytes

    def pack(self, capacity: int) -> bytearray:
        part = self.payload[:capacity]
        return bytearray(b"".join((self.length.to_bytes(8, "little"), self.tag, part, bytes(capacity - len(part)))))

    @classmethod
    def unpack(cls, buffer: bytes) -> _Slot:
        length = int.from_bytes(buffer[:8], "little")
        return cls(length, buffer[8:_HEADER_BYTES], buffer[_HEADER_BYTES : _HEADER_BYTES + length])


def _slot_of(payload: bytes, operation: str) -> _Slot:
    return _Slot(len(payload), hashlib.blake2b(operation.encode(), digest_size=_HEADER_BYTES - 8).digest(), payload)


def _gather_slots(payload: bytes, operation: str, capacity: int) -> list[_Slot]:
    size = _HEADER_BYTES + capacity
    received = bytes(_gather_buffer(_slot_of(payload, operation).pack(capacity)))
    return [_Slot.unpack(received[start : start + size]) for start in range(0, len(received), size)]


def _raise_meeting(slots: list[_Slot]) -> None:
    where = "; ".join(f"process {index}: {slot.payload.decode(errors='replace')}" for index, slot in enumerate(slots))
    raise DistributedError(
        f"the processes are in different operations: {where}. All have to make the same calls in the same order: look "
        "for a condition around one of these calls that holds on some processes only."
    )


def _broadcast_bytes(payload: bytes, from_process: int, operation: str) -> bytes:
    capacity = 8 * _FIRST_CAPACITY  # a random state fits in
    slot = _Slot.unpack(bytes(_broadcast_buffer(_slot_of(payload, operation).pack(capacity), from_process)))
    if slot.length <= capacity:
        return slot.payload
    rest = bytearray(payload[capacity:] or bytes(slot.length - capacity))
    return slot.payload + bytes(_broadcast_buffer(rest, from_process))


def _gather_buffer(buffer: bytearray) -> bytearray:
    received = bytearray(len(buffer) * world_size())
    device = control_device()
    target = torch.frombuffer(received, dtype=torch.uint8)  # shares the memory
    output = target.to(device)
    gather_into(output, torch.frombuffer(buffer, dtype=torch.uint8).to(device))
    if output is not target:
        target.copy_(output)
    return received


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
