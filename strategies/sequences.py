"""`Sequences`: contexts of steps in which each process has its part of every sequence."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import watch
from ..distributed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sequences(ABC):
    """Contexts in which this process has its part of each sequence, and attention goes over all parts.

    Args:
        axis: of the mesh, along which processes have parts.
    """

    word: ClassVar[str]
    """The option of a mesh for this axis."""
    size_word: ClassVar[str]
    """The same of a `ParallelismConfig`."""
    best_multiple: ClassVar[int] = 1
    """Of the size of the axis, by which lengths of sequences are best divided."""

    def __init__(self, axis: DeviceMesh) -> None:
        self._axis = axis
        self.is_inside = False
        """Whether this is inside of a context now."""
        self._length = 0
        """Of the whole sequences of a forward pass that was left before its backward; 0 where there is none."""
        self._has_compared = False
        """Whether processes were found to have the same sequences."""

    @contextmanager
    def cut(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        """As `Strategy.context_parallel`. Collective.

        Raises:
            ConfigError: buffers can't be cut in place, a kept one is none of them, this is inside of such a context, or
                attention can't be computed so.
            DataError: their sequences can't be cut into equal parts, or processes have different ones.
        """
        if self.is_inside:
            raise ConfigError("maybe_context_parallel was called inside of itself. Give all buffers to one call.")
        self._length = self._check(buffers, dims, kept)
        if not self._has_compared:
            self._has_compared = True
            self._compare(buffers)
        with self._entered(self._attending(buffers, dims, kept)):
            yield
        if not torch.is_grad_enabled():
            self._length = 0

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context of the backward of a forward pass, which may have left its own: a Task's loss goes backward behind
        its step. No effect where nothing was cut. Collective.
        """
        length, self._length = self._length, 0
        if self.is_inside or not length:
            yield
            return
        with self._entered(self._attending_again(length)):
            yield

    @abstractmethod
    def _attending(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[None]:
        """The context in which attention goes over all parts, and buffers have this process's."""

    @abstractmethod
    def _attending_again(self, length: int) -> AbstractContextManager[None]:
        """The same of a backward that comes later, over sequences of a length."""

    @contextmanager
    def _entered(self, context: AbstractContextManager[None]) -> Iterator[None]:
        with context:
            self.is_inside = True
            try:
                yield
            finally:
                self.is_inside = False

    def _check(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> int:
        """The length of the sequences in buffers. Local.

        Raises:
            ConfigError: they would be cut wrong, since they share memory.
            DataError: they can't be cut into equal parts.
        """
        if not buffers:
            raise ConfigError("maybe_context_parallel got no buffers. Give the step's inputs, targets and positions.")
        if any(all(each is not buffer for buffer in buffers) for each in kept):
            raise ConfigError(
                "no_restore_buffers of maybe_context_parallel holds a tensor that is not in buffers. Add it."
            )
        _check_memory(buffers)
        lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
        size = self._axis.size()
        if lengths[0] == 0 or lengths[0] % size or len(set(lengths)) > 1:
            best = f", and best of {self.best_multiple * size}" if self.best_multiple > 1 else ""
            raise DataError(
                f"maybe_context_parallel got sequences of {', '.join(map(str, lengths))}. Expected one length, which "
                f"is a multiple of {size}, the size of the mesh's {self.word} axis{best}: pad them."
            )
        return lengths[0]

    def _compare(self, buffers: Sequence[Tensor]) -> None:
        """Look once whether this process and the others along the axis have the same sequences. Collective along it.

        Raises:
            DataError: they have not, on all of them.
        """
        sums = [zlib.crc32(f"{each.dtype}{tuple(each.shape)}".encode(), _checksum(each)) for each in buffers]
        own = torch.tensor([len(sums), zlib.crc32(repr(sums).encode())], device=self._axis.device_type)
        rows = [torch.empty_like(own) for _ in range(self._axis.size())]
        with watch.collective("comparison of sequences"):
            dist.all_gather(rows, own, group=self._axis.get_group())
        if any(row.tolist() != own.tolist() for row in rows):
            raise DataError(
                f"processes along the mesh's {self.word} axis have different buffers in maybe_context_parallel, and "
                "each is to take its part of the same sequences. Prepare the loader, which gives them the same batches."
            )


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().flatten().view(torch.uint8).cpu().numpy().tobytes())


def _check_memory(buffers: Sequence[Tensor]) -> None:
    for index, buffer in enumerate(buffers):
        if not buffer.is_contiguous():
            raise ConfigError(
                f"buffers[{index}] of maybe_context_parallel is a view with strides {buffer.stride()}, and buffers are "
                "cut in place. Give buffer.contiguous()."
            )
    for (index, one), (other, two) in combinations(enumerate(buffers), 2):
        if _overlap(one, two):
            raise ConfigError(
                f"buffers[{index}] and buffers[{other}] of maybe_context_parallel share memory, and buffers are cut in "
                "place. Give one of them as buffer.clone()."
            )


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    begins = [each.data_ptr() for each in (one, two)]
    ends = [each.data_ptr() + each.numel() * each.element_size() for each in (one, two)]
    return max(begins) < min(ends)
