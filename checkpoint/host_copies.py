"""`HostCopies`: tensors copied to the host's memory, which is kept for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

import numpy as np
import torch
from torch import Tensor

_PINNED = ("cuda", "xpu")
"""Devices that copy beside the program where the host's memory is locked."""
_ALIGNMENT = 64
"""Of each copy in the memory, in bytes: a line of the cache."""


class HostCopies:
    """Memory on the host for copies of tensors; one set at a time is in use."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def replace(self, groups: Sequence[dict[str, Tensor]]) -> None:
        """Replace all tensors in these mappings by copies, in memory of an earlier call where it fits. Local."""
        tensors = [tensor for group in groups for tensor in group.values()]
        if [(copy.shape, copy.dtype) for copy in self._copies] != [(each.shape, each.dtype) for each in tensors]:
            self._copies = []  # what is there is free before there is more
            self._copies = _memory_for(tensors)
        _copy(tensors, self._copies)
        copies = iter(self._copies)
        for group in groups:
            group.update(zip([*group], copies, strict=False))


def _memory_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory for a copy of each: one piece, of which numpy asks the system for large pages, which are quicker."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    if any(tensor.device.type in _PINNED for tensor in tensors):
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    else:
        memory = torch.from_numpy(np.empty(sum(sizes), dtype=np.uint8))
    begins = accumulate(sizes, initial=0)
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, begin in zip(tensors, begins, strict=False)
    ]


def _copy(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    on_host = [tensor.device.type == "cpu" for tensor in tensors]
    with torch.no_grad():
        if any(on_host):  # one call for all is the quickest
            torch._foreach_copy_(list(compress(copies, on_host)), list(compress(tensors, on_host)))
        if all(on_host):
            return
        for copy, tensor in zip(copies, tensors, strict=True):
            if tensor.device.type != "cpu":
                copy.copy_(tensor, non_blocking=tensor.device.type in _PINNED)
    for device in {tensor.device for tensor in tensors if tensor.device.type in _PINNED}:
        torch.get_device_module(device).synchronize(device)
