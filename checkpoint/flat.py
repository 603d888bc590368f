"""`FlatPart`: a tensor of which this process holds a range of its elements, counted in rows as they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

_aten = torch.ops.aten
_OF_THE_RANGE = (_aten.detach.default, _aten.clone.default, _aten._to_copy.default)
"""What gives a part again, of the same range."""


@final
class FlatPart(Tensor):
    """The elements `begin` to `begin + len(local)` of a tensor's row-major order, which may be none. Local.

    It has the whole tensor's shape, and the memory, device and number format of what is held. It can be copied, moved
    and written into; anything else that torch could compute with it is an error.

    Args:
        local: what is held, flat, in memory that is shared with the part.
        begin: the place of its first element in the whole tensor.
        shape: of the whole tensor.
        is_copy: another process holds the range as well, and its values count where they differ.
    """

    local: Tensor
    begin: int
    is_copy: bool
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, local: Tensor, begin: int, shape: Sequence[int], is_copy: bool = False) -> FlatPart:
        # torch has no public name for a tensor that has a shape and leaves its memory to another.
        made: FlatPart = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        return made

    def __init__(self, local: Tensor, begin: int, shape: Sequence[int], is_copy: bool = False) -> None:
        self.local = local.detach()
        self.begin = begin
        self.is_copy = is_copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatPart({self.begin} to {self.begin + len(self.local)} of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises RuntimeError: it can't be computed from a part."""
        first = args[0] if args else None
        if func in _OF_THE_RANGE and isinstance(first, FlatPart):
            return FlatPart(func(first.local, *args[1:], **(kwargs or {})), first.begin, first.shape, first.is_copy)
        if func is _aten.copy_.default and isinstance(first, FlatPart) and first.shape == args[1].shape:
            first.local.copy_(first.range_of(args[1]))
            return first
        # No TypeError, of which Python's operators would make one of their own.
        raise RuntimeError(f"{func}: each process has a part of this tensor alone, from which it can't be computed.")

    def range_of(self, other: Tensor) -> Tensor:
        """The elements that another tensor of the shape has in the place of those held here. Local.

        Args:
            other: a whole tensor, or a part of the same range.
        """
        if not isinstance(other, FlatPart):
            return other.detach().flatten()[self.begin : self.begin + len(self.local)]
        if (other.begin, len(other.local)) != (self.begin, len(self.local)):
            raise TypeError(f"{other!r} is another range than {self!r}.")
        return other.local

    def gathered(self, device: torch.device | None = None) -> Tensor:
        """All of the tensor, on every process. Collective.

        Args:
            device: where it is put together; by default that of the part.
        """
        buffer = torch.zeros(self.shape.numel(), dtype=self.dtype, device=device or self.device)
        if not self.is_copy:
            buffer[self.begin : self.begin + len(self.local)].copy_(self.local)
        if dist.is_initialized():
            dist.all_reduce(buffer.view(torch.uint8))  # as bytes: a sum with zeros leaves each as it is, also -0.0
        return buffer.view(self.shape)
