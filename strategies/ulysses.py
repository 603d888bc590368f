"""Attention over sequences of which each process has a part, by exchanging parts of the sequence for heads.

The way of DeepSpeed-Ulysses (arXiv 2309.14509): before attention every process gives away most of its heads, and gets
the other parts of the sequence for those that it keeps; behind it they go back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..distributed import watch
from ..distributed.errors import ConfigError, DataError
from .sequences import Sequences

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HEADS, _LENGTH = 1, 2
"""Dimensions of queries, keys and values."""


@final
class ExchangedHeads(Sequences):
    """Every process attends with a part of the heads to whole sequences."""

    word = "sequence"
    size_word = "sp_size"

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__(axis)
        self._group = axis.get_group()
        self._size = axis.size()
        self._index = axis.get_local_rank()
        self._whole: Callable[..., Tensor] = F.scaled_dot_product_attention
        """What attends to whole sequences, while a context has another in its place."""
        self._whole_module: Callable[..., Any] = F.multi_head_attention_forward
        self._num_seen = 0
        """How often attention was computed."""
        # One object: compiled code is made again where it finds another.
        disable: Any = torch.compiler.disable
        self._attention = disable(self._attend, reason="processes exchange heads around attention")
        self._module_attention = self._attend_in_module

    @contextmanager
    def _attending(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        with self._cut_in_place(buffers, dims, kept), self._replaced():
            yield
        if not self._num_seen:
            raise ConfigError(
                "the first maybe_context_parallel has seen no attention by F.scaled_dot_product_attention, and other "
                "code sees this process's part of each sequence alone. Call the model inside of the context, compute "
                f"attention by that function, or leave {self.word} out of the mesh ({self.size_word}=1)."
            )

    def _attending_again(self, length: int) -> AbstractContextManager[None]:
        return self._replaced()

    @contextmanager
    def _cut_in_place(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        """A context in which buffers have this process's part, and those that are not kept are whole after it."""
        restored = [each for each in buffers if all(each is not other for other in kept)]
        before = [each.clone() for each in restored]
        for buffer, dim in zip(buffers, dims, strict=True):
            _become(buffer, buffer.chunk(self._size, dim)[self._index].clone())
        try:
            yield
        finally:
            for buffer, values in zip(restored, before, strict=True):
                _become(buffer, values)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """A context in which torch's attention is over whole sequences, also within torch's own modules."""
        functions: Any = F
        self._whole, self._whole_module = F.scaled_dot_product_attention, F.multi_head_attention_forward
        has_fast_path = torch.backends.mha.get_fastpath_enabled()  # that calls none of the two
        functions.scaled_dot_product_attention = self._attention
        functions.multi_head_attention_forward = self._module_attention
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            functions.scaled_dot_product_attention = self._whole
            functions.multi_head_attention_forward = self._whole_module
            torch.backends.mha.set_fastpath_enabled(has_fast_path)

    def _attend_in_module(self, *args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
        """As `F.multi_head_attention_forward`. Collective along the axis."""
        if need_weights:
            raise ConfigError(
                "nn.MultiheadAttention was called with need_weights=True, its default, inside of "
                "maybe_context_parallel: the weights of whole sequences are nowhere. Call it with need_weights=False."
            )
        return self._whole_module(*args, need_weights=False, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """As `F.scaled_dot_product_attention`, of parts of sequences. Collective along the axis.

        Args:
            query, key, value: of shape (batch, heads, length / processes, width).
            attn_mask: of whole sequences: it broadcasts to (batch, heads, length, length), or None.
            dropout_p, is_causal, options: as there.
        Returns:
            A tensor of shape (batch, query's heads, length / processes, value's width).
        Raises:
            ConfigError: heads can't be dealt to the processes.
            DataError: the mask or the keys are of other sequences than the queries.
        """
        self._num_seen += 1
        self._check_parts(query, key, value)
        num_heads, length = query.shape[_HEADS], query.shape[_LENGTH] * self._size
        mask = None if attn_mask is None else self._mask_of_own_heads(attn_mask, num_heads, length)
        wholes = self._exchange([self._by_heads(each) for each in (query, key, value)], _LENGTH)
        mixed = self._whole(*wholes, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **options)
        return self._exchange([_cut(mixed, _LENGTH, self._size)], _HEADS)[0]

    def _check_parts(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        if any(len(shape) != 4 for shape in shapes):
            raise ConfigError(
                f"attention on tensors of shapes {shapes} inside of maybe_context_parallel. Expected (batch, heads, "
                "length, width): heads are exchanged for parts of the sequence."
            )
        if query.shape[_HEADS] % self._size:
            raise ConfigError(
                f"{query.shape[_HEADS]} heads of attention can't be dealt to the {self._size} processes of the mesh's "
                f"{self.word} axis. Choose a size ({self.size_word}) that divides them; a tensor axis cuts them before."
            )
        if key.shape[_LENGTH] != query.shape[_LENGTH]:
            raise DataError(
                f"attention of {query.shape[_LENGTH]} queries to {key.shape[_LENGTH]} keys inside of "
                "maybe_context_parallel. Expected as many of each: they are a process's part of the same sequences. "
                "Keys that every process has whole (a cache, a prefix, add_bias_kv) have no place there."
            )

    def _by_heads(self, part: Tensor) -> Tensor:
        """The heads for each process: of shape (processes, batch, heads / processes, length / processes, width).

        Fewer keys' and values' heads than processes are repeated, as often as needed. They stay with their queries.
        """
        heads = part.shape[_HEADS]
        if heads % self._size:
            part = part.repeat_interleave(self._size // math.gcd(heads, self._size), dim=_HEADS)
        return _cut(part, _HEADS, self._size)

    def _exchange(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Give each process its part of tensors, and put together those that come, in the order of the processes.
        Collective along the axis; the tensors go together.

        Args:
            tensors: of shape (processes, ...), a part for each.
            dim: of a part, along which those of all processes are put together.
        """
        tensors = [_as_computed(each) for each in tensors]
        sent = torch.cat([each.flatten(1) for each in tensors], dim=1)
        received: Tensor = _AllToAll.apply(sent, self._group)  # type: ignore[no-untyped-call]
        pieces = torch.split(received, [each[0].numel() for each in tensors], dim=1)
        shaped = [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]
        return [each.movedim(0, dim).flatten(dim, dim + 1) for each in shaped]

    def _mask_of_own_heads(self, mask: Tensor, num_heads: int, length: int) -> Tensor:
        rows, columns = (1, *mask.shape)[-2:]
        if columns != length or rows not in (1, length):
            raise DataError(
                f"attn_mask of shape {tuple(mask.shape)} inside of maybe_context_parallel. Attention is over the whole "
                f"{length} positions there: give a mask of ({length}, {length}), or none, with is_causal=True."
            )
        if mask.dim() < 3 or mask.shape[-3] != num_heads or num_heads == 1:
            return mask
        return mask.chunk(self._size, dim=-3)[self._index]


class _AllToAll(torch.autograd.Function):
    """Row i of every process goes to process i, which has them in the order of the processes. Collective.

    That is its own reverse, and so its own gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        with watch.collective("exchange of attention's heads"):
            dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


def _cut(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The parts of a tensor along a dimension, in a first dimension of their own."""
    return torch.unflatten(tensor, dim, (count, -1)).movedim(dim, 0)


def _as_computed(tensor: Tensor) -> Tensor:
    """A tensor in the format in which attention computes under autocast."""
    device = tensor.device.type
    computes = torch.is_autocast_enabled(device) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if computes else tensor


@torch.no_grad()
def _become(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor another shape and values, in place."""
    tensor.resize_(values.shape)
    tensor.copy_(values)
