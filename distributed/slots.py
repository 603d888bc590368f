"""The channel on which processes send each other control messages: one all-gather of slots of the same size.

Every message begins with such a gather, whatever it is: a barrier, a vector, a value, an object. A slot says how long
the message is and which operation it belongs to. So two different operations that meet have buffers of the same size
(gloo ends the process where sizes differ), and each process sees what each other one is doing.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import DistributedError

HEADER_BYTES = 64
"""Before the payload of a slot: its whole length (8), and the operation's tag (8) and name (48)."""
FIRST_CAPACITY = 1024 - HEADER_BYTES
"""Bytes of payload in a slot at first; long values make later slots larger."""
LARGEST_CAPACITY = 16 * 1024 - HEADER_BYTES

_LENGTH = struct.Struct("<Q")
_NAME_BYTES = HEADER_BYTES - _LENGTH.size - 8


class Channel:
    """The slots of torch's default group. All its processes change their capacity at the same call.

    Args:
        num_processes: how many are in the group.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.capacity = FIRST_CAPACITY
        """Bytes of payload in the next slot."""
        self.device = control_device()
        """Where slots travel."""

    def slot(self, payload: bytes, operation: str) -> bytearray:
        """A slot with the payload as far as the capacity goes. Local."""
        slot = self.empty_slot(len(payload), operation)
        part = payload[: self.capacity]
        slot[HEADER_BYTES : HEADER_BYTES + len(part)] = part
        return slot

    def empty_slot(self, length: int, operation: str) -> bytearray:
        """A slot for a payload of `length` bytes, which is to be written after the header. Local."""
        slot = bytearray(HEADER_BYTES + self.capacity)
        slot[:HEADER_BYTES] = _LENGTH.pack(length) + _mark(operation)
        return slot

    def send(self, slot: bytearray, *, waits: bool = True) -> SentSlot:
        """Begin to send a slot to every process, and to receive theirs. Collective.

        Args:
            slot: this process's, of the present capacity.
            waits: return when all have arrived.
        """
        return SentSlot(slot, self.num_processes, self.device, waits)

    def grow(self, length: int) -> None:
        """Have room for payloads of this length from now on, as far as that is sensible. Local; alike everywhere."""
        needed = (1 << (HEADER_BYTES + length - 1).bit_length()) - HEADER_BYTES
        self.capacity = max(self.capacity, min(needed, LARGEST_CAPACITY))


class SentSlot:
    """Slots on their way from every process to every process. Made by `Channel.send`."""

    __slots__ = ("_output", "_received", "_source", "_target", "_work", "size")

    def __init__(self, slot: bytearray, num_processes: int, device: torch.device, waits: bool) -> None:
        self.size = len(slot)
        """Bytes of one slot."""
        self._received = bytearray(num_processes * self.size)
        self._source = torch.frombuffer(slot, dtype=torch.uint8)  # shares the memory
        self._target = self._output = torch.frombuffer(self._received, dtype=torch.uint8)
        if device.type != "cpu":
            self._source, self._output = self._source.to(device), self._target.to(device)
        self._work = gather_into(self._output, self._source, async_op=not waits)

    def read(self) -> bytearray:
        """The slots of all processes, one after another; waits for them.

        Raises:
            DistributedError: on every process: they are in different operations; shows which.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._output is not self._target:
            self._target.copy_(self._output)
            self._output = self._target
        received, size = self._received, self.size
        marks = {bytes(received[start + 8 : start + HEADER_BYTES]) for start in range(0, len(received), size)}
        if len(marks) > 1:
            raise _different_operations(received, size)
        return received

    def lengths(self) -> list[int]:
        """The length of each process's payload. Local, after `read`."""
        return [_LENGTH.unpack_from(self._received, start)[0] for start in range(0, len(self._received), self.size)]

    def payloads(self) -> list[bytes]:
        """Each process's payload, as far as the capacity went. Local, after `read`."""
        found = []
        for index, length in enumerate(self.lengths()):
            start, end = index * self.size + HEADER_BYTES, (index + 1) * self.size
            found.append(bytes(self._received[start : min(start + length, end)]))
        return found


# torch has one default group; it is gone when a script destroys it, and with it its channel.
_channels: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()


def channel() -> Channel:
    """That of torch's default group. Local."""
    group = dist.group.WORLD
    found = _channels.get(group)
    if found is None:
        found = _channels[group] = Channel(dist.get_world_size())
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


@functools.lru_cache(maxsize=256)
def _mark(operation: str) -> bytes:
    """What tells an operation from others, also where its name does not fit in: a tag, and how its name begins."""
    name = operation.encode(errors="replace")
    return hashlib.blake2b(name, digest_size=8).digest() + name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _different_operations(received: bytearray, size: int) -> DistributedError:
    names = [bytes(received[start + 16 : start + HEADER_BYTES]) for start in range(0, len(received), size)]
    shown = [name.rstrip(b"\0").decode(errors="ignore") for name in names]
    where = "; ".join(f"process {index}: {name}" for index, name in enumerate(shown))
    return DistributedError(
        f"the processes are in different operations: {where}. All have to make the same calls in the same order: look "
        "for a condition around one of these calls that holds on some processes only."
    )
