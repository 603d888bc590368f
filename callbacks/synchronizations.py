"""How often code waits for a device, found out by the operations that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .ledger import Cost

_aten = torch.ops.aten
_READING = frozenset({
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default,
    _aten._unique2.default, _aten.unique_dim.default, _aten.repeat_interleave.Tensor,
})  # fmt: skip
"""What has to know a tensor's values on the host."""
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default})
_COPYING = frozenset({_aten._to_copy.default, _aten.copy_.default})


class SynchronizationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations by which handlers of events wait for a device: values read (`item`, `bool`, `equal`), sizes
    that depend on values (`nonzero`, a mask as index), copies from a device to the host.

    Reads and sizes are counted on the CPU as well, where nothing waits, so that a laptop shows what would wait on an
    accelerator. What is no operation of torch, such as `torch.cuda.synchronize()`, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cost: Cost | None = None
        """Whose operations these are."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._cost is not None and waits(func, args, named):
            self._cost.synchronizations += 1
        return func(*args, **named)

    def counted(self, handler: Callable[..., Any], cost: Cost) -> Callable[..., Any]:
        """The handler, with what it waits for added to its cost; without what other handlers do that it calls."""

        def call(*values: Any) -> Any:
            outer, self._cost = self._cost, cost
            try:
                if outer is not None:  # the operations of both come here already
                    return handler(*values)
                with self:
                    return handler(*values)
            finally:
                self._cost = outer

        return call


def waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation of torch waits, on a device, for what was computed before.

    Args:
        func: as `TorchDispatchMode` gives it, and so the others.
        args: of the call.
        kwargs: of the call.
    """
    if func in _READING:
        return True
    if func in _INDEXING:
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func not in _COPYING:
        return False
    is_copy = func is _aten.copy_.default
    source = args[1] if is_copy else args[0]
    target = args[0].device if is_copy else kwargs.get("device") or source.device
    is_asynchronous = args[2] if is_copy and len(args) > 2 else kwargs.get("non_blocking", False)
    return source.device.type != "cpu" and torch.device(target).type == "cpu" and not is_asynchronous
