"""`HostCopies`: tensors copied to the host's memory, which is kept for the next time."""

from __future__ import annotations

import torch
from torch import Tensor

_PINNED = ("cuda", "xpu")
"""Devices that copy beside the program where the host's memory is locked."""


class HostCopies:
    """Memory on the host for copies of tensors; one set at a time is in use."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def replace(self, groups: list[dict[str, Tensor]]) -> None:
        """Replace all tensors in these mappings by copies, in memory of an earlier call where it fits. Local."""
        devices: set[torch.device] = set()
        count = 0
        for group in groups:
            for name, tensor in group.items():
                copy = self._room(count, tensor)
                copy.copy_(tensor.detach(), non_blocking=copy.is_pinned() if tensor.device.type in _PINNED else False)
                if tensor.device.type in _PINNED:
                    devices.add(tensor.device)
                group[name] = copy
                count += 1
        del self._memory[count:]
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def _room(self, index: int, tensor: Tensor) -> Tensor:
        """Contiguous memory for one tensor."""
        size = tensor.numel() * tensor.element_size()
        is_pinned = tensor.device.type in _PINNED
        found = self._memory[index] if index < len(self._memory) else None
        if found is None or len(found) != size or found.is_pinned() != is_pinned:
            found = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            self._memory[index : index + 1] = [found]
        return found.view(tensor.dtype).view(tensor.shape)
