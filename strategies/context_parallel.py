"""Attention over sequences of which each process has a part: its contexts, and what models have to leave out for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..distributed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sequences:
    """Contexts in which this process has its part of each sequence, and attention goes over all parts.

    Args:
        axis: of the mesh, along which processes have parts.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self._axis = axis
        self._is_inside = False
        self._length = 0
        """Of the whole sequences of a forward pass that was left before its backward; 0 where there is none."""

    @contextmanager
    def cut(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        """As `Strategy.context_parallel`. Collective.

        Raises:
            ConfigError: buffers can't be cut in place, or a kept one is none of them.
            DataError: their sequences can't be cut into equal parts.
        """
        self._length = _check_buffers(buffers, dims, kept, self._axis.size())
        with self._attending(buffers, dims, kept):
            yield
        if not torch.is_grad_enabled():
            self._length = 0

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context of the backward of a forward pass, which may have left its own: a Task's loss goes backward behind
        its step. No effect where nothing was cut. Collective.
        """
        length, self._length = self._length, 0
        if self._is_inside or not length:
            yield
            return
        # Torch takes the order of the parts from the length.
        like = torch.zeros(length, device=self._axis.device_type)
        with self._attending([like], [0], [like]):
            yield

    @contextmanager
    def _attending(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        options: dict[str, Any] = {"buffer_seq_dims": list(dims), "no_restore_buffers": set(kept)}
        with context_parallel(self._axis, buffers=list(buffers), **options):
            self._is_inside = True
            try:
                yield
            finally:
                self._is_inside = False


def prepare_attention(model: nn.Module) -> None:
    """Let the modules that are called `self_attn`, as those of Hugging Face are, go without their masks. Local.

    torch cuts plain causal attention alone over sequences; a mask would have the shape of whole ones.

    Raises:
        ConfigError: layers attend to less than all that came before, which their masks would say, or by other code than
            torch's `scaled_dot_product_attention`.
    """
    if others := _narrow_layers(model):
        raise ConfigError(
            f"{type(model).__name__} has attention of kind {', '.join(others)}, and context parallelism has no masks "
            "but the causal one. Use a model of full attention, or leave context out of the mesh (cp_size=1)."
        )
    if others := _other_kernels(model):
        raise ConfigError(
            f"{type(model).__name__} computes attention by {', '.join(others)}, which would see this process's part of "
            "each sequence alone. Load it with attn_implementation='sdpa', or leave context out of the mesh "
            "(cp_size=1)."
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_without_mask, with_kwargs=True)


def choose_rotation(word: str) -> None:
    """How keys and values of the other parts of a sequence come to this process: `"allgather"` or `"alltoall"`. Local;
    torch keeps it for the whole process.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(word)


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if "attention_mask" in kwargs:
        kwargs = kwargs | {"attention_mask": None, "is_causal": True}
    return args, kwargs


def _narrow_layers(model: nn.Module) -> list[str]:
    """The kinds of attention that a model's configuration names beside full attention."""
    found: set[str] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            found |= {str(kind) for kind in kinds if kind != "full_attention"}
        elif getattr(config, "sliding_window", None):
            found.add("sliding_attention")
    return sorted(found)


def _other_kernels(model: nn.Module) -> list[str]:
    """What a model's configurations name as the code of attention, beside torch's."""
    configs = (getattr(module, "config", None) for module in model.modules())
    named = {getattr(config, "_attn_implementation", None) for config in configs}
    return sorted(str(name) for name in named - {None, "sdpa"})


def _check_buffers(buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor], size: int) -> int:
    """The length of the sequences in buffers. Local.

    Raises:
        ConfigError: torch would cut them wrong, since they share memory.
        DataError: they can't be cut into equal parts.
    """
    if not buffers:
        raise ConfigError("maybe_context_parallel got no buffers. Give the step's inputs, targets and positions.")
    if any(all(each is not buffer for buffer in buffers) for each in kept):
        raise ConfigError("no_restore_buffers of maybe_context_parallel holds a tensor that is not in buffers. Add it.")
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
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if lengths[0] == 0 or lengths[0] % size or len(set(lengths)) > 1:
        raise DataError(
            f"maybe_context_parallel got sequences of {', '.join(map(str, lengths))}. Expected one length, which is a "
            f"multiple of {size}, the size of the mesh's context axis, and best of {2 * size}: pad them."
        )
    return lengths[0]


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    begins = [each.data_ptr() for each in (one, two)]
    ends = [each.data_ptr() + each.numel() * each.element_size() for each in (one, two)]
    return max(begins) < min(ends)
