"""`Transfer`: the batches of a pass go to the device, the next one while the present one is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..distributed.nested import named_tensors, send_to_device


def has_streams(device: torch.device) -> bool:
    """Whether copies to the device can go on beside its computations."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


class SideStream:
    """A stream of the device beside the one that computes. Local.

    Args:
        device: one that has streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def used(self) -> AbstractContextManager[Any]:
        """A context in which copies go on beside the computations."""
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

    def hand_over(self, moved: Any) -> None:
        """Let the computations that are enqueued from now on wait for what was copied so far, `moved` among it."""
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        for _, tensor in named_tensors(moved):
            if tensor.device == current.device:
                tensor.record_stream(current)  # its memory is not used again before this stream is done with it


class Transfer:
    """Moves the batches of one pass to the device, each in its turn. Local.

    With a side stream one batch at most is there beyond those in use.

    Args:
        device: where to.
        non_blocking: don't wait for copies out of pinned memory.
        side: where the copy of the next batch goes on while the present one is used; None: nothing goes ahead.
    """

    def __init__(self, device: torch.device, *, non_blocking: bool = False, side: SideStream | None = None) -> None:
        self._device = device
        self._non_blocking = non_blocking
        self._side = side
        self._under_way: tuple[Any, Any] | None = None
        """A batch, and what it becomes on the device."""

    def next(self, batch: Any, ahead: Sequence[Any]) -> Any:
        """The batch on the device; with a side stream the first one of `ahead` is on its way from now on.

        What can't be moved raises its error in its own turn, and what is moved by code of its own is moved there.
        """
        under_way, self._under_way = self._under_way, None
        side = self._side
        if side is None or under_way is None or under_way[0] is not batch:
            moved = self._send(batch)
        else:
            moved = under_way[1]
            side.hand_over(moved)
        if side is not None and ahead and _can_go_ahead(ahead[0]):
            self._under_way = self._start(side, ahead[0])
        return moved

    def _start(self, side: SideStream, batch: Any) -> tuple[Any, Any] | None:
        try:
            with side.used():
                return batch, self._send(batch)
        except Exception:  # noqa: BLE001 - moved again in its turn, where what is still wrong is raised
            return None  # too little memory for one more, or a batch at fault: the present one is none the worse

    def _send(self, batch: Any) -> Any:
        return send_to_device(batch, self._device, self._non_blocking)


def _can_go_ahead(data: Any) -> bool:
    """Whether moving nested data runs no code of its own, which may draw or compute, and all its tensors are seen."""
    if isinstance(data, Tensor):
        return data.layout is torch.strided and not hasattr(data, "__tensor_flatten__")
    if isinstance(data, (tuple, list)):
        return not isinstance(data, PackedSequence) and all(map(_can_go_ahead, data))
    if isinstance(data, Mapping):
        return all(map(_can_go_ahead, data.values()))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = (getattr(data, field.name) for field in dataclasses.fields(data))
        return not hasattr(data, "__post_init__") and all(map(_can_go_ahead, values))
    return not callable(getattr(data, "to", None))
