"""What operations allocate and free, seen on tensors that have shapes and no data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory import BYTES, Event


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes each storage which an operation brings into being, and its end.

    Entered inside of a `FakeTensorMode`. A number that is read from a tensor without data counts as 1.

    Args:
        device: whose memory counts.
        known: tensors that exist already and are not counted.
        reads_all: whether integers and truth values may be read as well, on which shapes could depend.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = (), *, reads_all: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._device = device
        self._known = list(known)
        self._outside = {id(tensor.untyped_storage()) for tensor in self._known}
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._reads_all = reads_all

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(func, args)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_of(outputs):
            if tensor.device.type == self._device.type:
                self._note(tensor.untyped_storage())
        return outputs

    def mark(self, what: str, value: int = 0) -> None:
        """Note something that is no allocation."""
        self.events.append(Event(what, value))

    def hand_over(self, tensor: Tensor) -> None:
        """Count a tensor's storage as freed: somebody else counts it from now on."""
        self._freed(id(tensor.untyped_storage()))

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one Python object for each storage, as long as that lives
        if key in self._sizes or key in self._outside:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self._watches[key] = weakref.ref(storage, lambda _: self._freed(key))
        self.events.append(Event(BYTES, size))

    def _freed(self, key: int) -> None:
        self._watches.pop(key, None)
        size = self._sizes.pop(key, 0)
        if size:
            self.events.append(Event(BYTES, -size))

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException

        try:
            return func(*args)
        except DataDependentOutputException:
            dtype = args[0].dtype
            if dtype.is_floating_point:
                return 1.0
            if not self._reads_all:
                raise
            return True if dtype == torch.bool else 1


def tensors_of(nested: Any) -> Iterator[Tensor]:
    """The tensors among the leaves of nested data."""
    return (leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor))


def fake_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape, strides and format; without data where a `FakeTensorMode` is on."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device)
