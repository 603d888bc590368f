"""`HostCopies`: tensors copied to the host's memory, which is kept for the next time."""

from __future__ import annotations

import torch
from torch import Tensor

_PINNED = ("cuda", "xpu")
"""Devices that copy beside the program where the host's memory is locked."""


class HostCopies:
    """Memory on the host for copies of tensors; one set at a time is in use."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def replace(self, groups: list[dict[str, Tensor]]) -> None:
        """Replace all tensors in these mappings by copies, in memory of an earlier call where it fits. Local."""
        devices: set[torch.device] = set()
        earlier, self._copies = self._copies, []
        with torch.no_grad():
            for index, (group, name) in enumerate([(each, name) for each in groups for name in each]):
                tensor = group[name]
                is_beside = tensor.device.type in _PINNED
                copy = earlier[index] if index < len(earlier) else None
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_beside)
                copy.copy_(tensor, non_blocking=is_beside)
                if is_beside:
                    devices.add(tensor.device)
                group[name] = copy
                self._copies.append(copy)
        for device in devices:
            torch.get_device_module(device).synchronize(device)
