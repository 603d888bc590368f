"""Batches on their way to an XLA device: the next one goes there while the present one is computed with."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..data.transfer import SideStream, Transfer
from ..distributed import xla
from ..distributed.nested import named_tensors, recursively_apply, send_to_device

MOST_SHAPES = 8
"""Shapes that a warning shows."""


class XLATransfer(Transfer):
    """Moves the batches of one pass to the XLA device. Handing one out runs what was recorded before. Local.

    Copies go on by themselves once they were begun, so that no thread reads ahead, as that of torch_xla's own loader
    does: batches are read here, in their order, and the position in the data is known.

    Args:
        device: where to.
        shapes: those that this loader's batches had so far.
        upload: brings a tensor of the host to the device.
    """

    def __init__(self, device: torch.device, shapes: BatchShapes, upload: Callable[[Tensor], Tensor]) -> None:
        super().__init__(device, side=_Uploads())
        self._shapes = shapes
        self._upload = upload

    def next(self, batch: Any, ahead: Sequence[Any]) -> Any:
        xla.sync()
        self._shapes.see(batch)
        return super().next(batch, ahead)

    def _send(self, batch: Any) -> Any:
        if not _has_packed(batch):
            batch = recursively_apply(self._upload, batch, test_type=_is_plain)
        return send_to_device(batch, self._device)


class BatchShapes:
    """The shapes that the batches of one loader have had: each new one is a new program to compile.

    Args:
        name: what the loader is, for the warning; None: there is to be none.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._seen: dict[tuple[tuple[int, ...], ...], None] = {}
        self._is_silent = name is None

    def see(self, batch: Any) -> None:
        """Note a batch, and warn once when a second shape comes. Local."""
        if self._is_silent:
            return
        shape = tuple(tuple(tensor.shape) for _, tensor in named_tensors(batch))
        if shape in self._seen:
            return
        self._seen[shape] = None
        if len(self._seen) > 1:
            self._is_silent = True
            first, other = (", ".join(str(list(each)) for each in shape[:MOST_SHAPES]) for shape in self._seen)
            warnings.warn(
                f"batches of {self._name} change their shapes: {first}, and now {other}. XLA compiles the step anew "
                "for each shape, for seconds or minutes. Pad sequences to one length (or to few), and use "
                "drop_last=True where the last batch is short.",
                stacklevel=2,
            )


def unwrapped_loader(loader: Iterable[Any]) -> Iterable[Any]:
    """What torch_xla's `MpDeviceLoader` reads, where it is one: its threads would read ahead of the position. Local."""
    module = sys.modules.get("torch_xla.distributed.parallel_loader")
    if module is not None and isinstance(loader, module.MpDeviceLoader):
        return loader._loader  # type: ignore[no-any-return]
    return loader


def uploader(device: torch.device, sharding_of: Callable[[Tensor], Any] | None = None) -> Callable[[Tensor], Tensor]:
    """What begins to copy a tensor of the host to the device. Local.

    Args:
        device: where to.
        sharding_of: says how a tensor is cut over the devices, by torch_xla's `ShardingSpec`; None: it is whole.
    """
    model = xla.load("core.xla_model")

    def upload(tensor: Tensor) -> Tensor:
        sharding = None if sharding_of is None else sharding_of(tensor)
        moved: Tensor = model.send_cpu_data_to_device(tensor, device, sharding)[0]
        return moved

    return upload


class _Uploads(SideStream):
    """In the place of a stream: copies to an XLA device go on by themselves."""

    def __init__(self) -> None:
        pass

    def used(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hand_over(self, moved: Any) -> None:
        pass


def _has_packed(data: Any) -> bool:
    """Whether there is a packed sequence in nested data: one of its tensors stays on the host."""
    if isinstance(data, (tuple, list)):
        return isinstance(data, PackedSequence) or any(map(_has_packed, data))
    return isinstance(data, Mapping) and any(map(_has_packed, data.values()))


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor of the host that is nothing but its values."""
    return type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
