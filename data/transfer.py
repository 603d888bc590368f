"""`SideStream`: the next batch goes to the device while the present one is used."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ..distributed.nested import named_tensors, send_to_device


def has_streams(device: torch.device) -> bool:
    """Whether copies to the device can go on beside its computations."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


class SideStream:
    """Moves the batches of one pass, each while the one before is used. Local.

    Args:
        device: one that has streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self._started: Any = None
        self._is_started = False

    def next(self, batch: Any, ahead: deque[Any]) -> Any:
        """The batch on the device; the copy of the first one of `ahead` goes on in the background from now on."""
        moved = self._started if self._is_started else self._start(batch)
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        for _, tensor in named_tensors(moved):
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)  # its memory is not used again before this stream is done with it
        self._is_started = bool(ahead)
        self._started = self._start(ahead[0]) if ahead else None
        return moved

    def _start(self, batch: Any) -> Any:
        with self._module.stream(self._stream):
            return send_to_device(batch, self._device, non_blocking=True)
