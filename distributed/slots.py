"""The channel on which processes send each other control messages: slots, one of each process to every process.

Every message begins so, whatever it is: a barrier, a vector, a value, an object. A slot says how long the message is
and which operation it belongs to. So two different operations that meet are alike for what carries them (gloo ends the
process where sizes differ), and each process sees what each other one is doing.

What carries slots is the memory of the machine where all processes share one (`shared.py`), else torch's default group.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import watch
from .errors import DistributedError, ShapeMismatchError
from .group import joined_place

HEADER_BYTES = 64
"""Before the payload of a slot: its whole length (8), and the operation's tag (8) and name (48)."""
FIRST_CAPACITY = 1024 - HEADER_BYTES
"""Bytes of payload in a slot at first; long values make later slots larger."""
LARGEST_CAPACITY = 16 * 1024 - HEADER_BYTES

_LENGTH = struct.Struct("<Q")
_NAME_BYTES = HEADER_BYTES - _LENGTH.size - 8


class Carrier(Protocol):
    """What brings slots from every process to every process."""

    def send(self, slot: bytes, size: int) -> Callable[[], list[bytes]]:
        """Begin to send a slot to every process, and to receive theirs. Collective.

        Args:
            slot: this process's.
            size: bytes that each process has room for, the same on all.
        Returns:
            What waits for all of them, and gives them, process 0 first; they may be filled up to the size.
        """


class Channel:
    """The control messages of torch's default group.

    Args:
        carrier: brings the slots.
        capacity: bytes of payload in the first slots. All processes change it at the same call.
    """

    def __init__(self, carrier: Carrier, capacity: int = FIRST_CAPACITY) -> None:
        self._carrier = carrier
        self.capacity = capacity
        """Bytes of payload in the next slot."""
        self.num_sent = 0
        """Slots that this process has sent."""

    def send(self, payload: bytes, operation: str) -> SentSlot:
        """Begin to send a payload to every process, as far as the capacity goes, and to receive theirs. Collective.

        Args:
            payload: this process's.
            operation: what it belongs to.
        """
        self.num_sent += 1
        slot = _LENGTH.pack(len(payload)) + _mark(operation) + payload[: self.capacity]
        return SentSlot(self._carrier.send(slot, HEADER_BYTES + self.capacity))

    def grow(self, length: int) -> None:
        """Have room for payloads of this length from now on, as far as that is sensible. Local; alike everywhere."""
        needed = (1 << (HEADER_BYTES + length - 1).bit_length()) - HEADER_BYTES
        self.capacity = max(self.capacity, min(needed, LARGEST_CAPACITY))


class SentSlot:
    """Slots on their way from every process to every process. Made by `Channel.send`."""

    __slots__ = ("_receive",)

    def __init__(self, receive: Callable[[], list[bytes]]) -> None:
        self._receive = receive

    def read(self) -> list[Slot]:
        """The slots of all processes, process 0 first; waits for them.

        Raises:
            DistributedError: on every process: they are in different operations; shows which.
        """
        return _checked(self._receive())

    def read_numbers(self, layout: struct.Struct) -> list[tuple[float, ...]]:
        """The payloads of all processes as numbers, process 0 first; waits for them.

        Args:
            layout: that of each payload.
        Raises:
            DistributedError: as `read`.
            ShapeMismatchError: another process has sent a payload of another length.
        """
        slots = self._receive()
        begin = _LENGTH.pack(layout.size) + slots[0][_LENGTH.size : HEADER_BYTES]
        for slot in slots:
            if not slot.startswith(begin):
                lengths = [each.length // 8 for each in _checked(slots)]
                raise ShapeMismatchError(
                    f"{_name_of(slot)}: the processes sent {lengths} numbers. Each has to send as many as the others."
                )
        return [layout.unpack_from(slot, HEADER_BYTES) for slot in slots]


class Slot:
    """What one process has sent."""

    __slots__ = ("_bytes", "length")

    def __init__(self, received: bytes) -> None:
        self._bytes = received
        (self.length,) = _LENGTH.unpack_from(received)
        """Bytes of the whole payload."""

    @property
    def payload(self) -> bytes:
        """The payload, as far as the capacity went."""
        return self._bytes[HEADER_BYTES : HEADER_BYTES + self.length]


class GroupCarrier:
    """Carries slots by one all-gather of torch's default group."""

    def __init__(self) -> None:
        self._count = dist.get_world_size()
        self._device = control_device()

    def send(self, slot: bytes, size: int) -> Callable[[], list[bytes]]:
        """See `Carrier.send`."""
        received = bytearray(self._count * size)
        target = output = torch.frombuffer(received, dtype=torch.uint8)  # shares the memory
        source = torch.frombuffer(bytearray(slot.ljust(size, b"\0")), dtype=torch.uint8)
        if self._device.type != "cpu":
            source, output = source.to(self._device), target.to(self._device)
        work = gather_into(output, source, async_op=True)

        def receive() -> list[bytes]:
            work.wait()
            if output is not target:
                target.copy_(output)
            return [bytes(received[start : start + size]) for start in range(0, len(received), size)]

        return receive


# torch has one default group; it is gone when a script destroys it, and with it its channel.
_channels: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()


def channel() -> Channel:
    """That of torch's default group. Collective the first time, when processes find out what can carry it."""
    group = dist.group.WORLD
    found = _channels.get(group)
    if found is None:
        found = _channels[group] = _open_channel()
    return found


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


def group_timeout() -> timedelta | None:
    """How long the default group's collectives wait for other processes, None where its backend doesn't say. Local."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(control_device())
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _open_channel() -> Channel:
    over_group = Channel(GroupCarrier())
    if os.name != "posix":  # there are no locks that end with their process
        return over_group
    from .shared import open_shared

    place = joined_place()

    def gather(text: str) -> list[str]:
        return [slot.payload.decode() for slot in over_group.send(text.encode(), "open a channel").read()]

    memory = open_shared(
        gather,
        dist.get_rank(),
        node=0 if place is None else place.node_index,
        largest=HEADER_BYTES + LARGEST_CAPACITY,
        timeout=group_timeout() or dist.default_pg_timeout,
    )
    if memory is None:
        return over_group
    watch.note_connection(memory)
    return Channel(memory, LARGEST_CAPACITY)


@functools.lru_cache(maxsize=256)
def _mark(operation: str) -> bytes:
    """What tells an operation from others, also where its name does not fit in: a tag, and how its name begins."""
    name = operation.encode(errors="replace")
    return hashlib.blake2b(name, digest_size=8).digest() + name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _checked(slots: list[bytes]) -> list[Slot]:
    if len({slot[_LENGTH.size : HEADER_BYTES] for slot in slots}) > 1:
        raise _different_operations(slots)
    return [Slot(slot) for slot in slots]


def _different_operations(slots: list[bytes]) -> DistributedError:
    where = "; ".join(f"process {index}: {_name_of(slot)}" for index, slot in enumerate(slots))
    return DistributedError(
        f"the processes are in different operations: {where}. All have to make the same calls in the same order: look "
        "for a condition around one of these calls that holds on some processes only."
    )


def _name_of(slot: bytes) -> str:
    return slot[HEADER_BYTES - _NAME_BYTES : HEADER_BYTES].rstrip(b"\0").decode(errors="ignore")
