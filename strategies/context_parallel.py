"""Attention over sequences of which each process has a part: torch's ring, and what models have to leave out for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..distributed.errors import ConfigError, DataError
from .sequences import Sequences
from .wrapping import class_of


@final
class RingAttention(Sequences):
    """Keys and values go from process to process, as torch has it: on accelerators alone."""

    word = "context"
    size_word = "cp_size"
    best_multiple = 2

    def _attending(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[None]:
        from torch.distributed.tensor.experimental import context_parallel

        options: dict[str, Any] = {"buffer_seq_dims": list(dims), "no_restore_buffers": set(kept)}
        return context_parallel(self._axis, buffers=list(buffers), **options)

    def _attending_again(self, length: int) -> AbstractContextManager[None]:
        # Torch takes the order of the parts from the length.
        like = torch.zeros(length, device=self._axis.device_type)
        return self._attending([like], [0], [like])


def prepare_attention(model: nn.Module, sequences: Sequences) -> None:
    """Let the modules that are called `self_attn`, as those of Hugging Face are, go without their causal masks where
    sequences are in parts, and refuse what would be wrong there. Local.

    A mask that a model makes has the shape of a part; causal attention needs none.

    Args:
        model: any.
        sequences: the contexts of steps on parts.
    Raises:
        ConfigError: layers attend to less than all that came before, which their masks would say, or by other code than
            torch's `scaled_dot_product_attention`, or by that under another name.
    """
    name, way_out = type(model).__name__, f"leave {sequences.word} out of the mesh ({sequences.size_word}=1)"
    if others := _narrow_layers(model):
        raise ConfigError(
            f"{name} has attention of kind {', '.join(others)}, and on parts of sequences there are no masks but the "
            f"causal one. Use a model of full attention, or {way_out}."
        )
    if others := _other_kernels(model):
        raise ConfigError(
            f"{name} computes attention by {', '.join(others)}, which would see this process's part of each sequence "
            f"alone. Load it with attn_implementation='sdpa', or {way_out}."
        )
    if others := _importers(model):
        raise ConfigError(
            f"{', '.join(others)} of {name} imports scaled_dot_product_attention by its name, where it can't be "
            f"replaced. Call it as torch.nn.functional.scaled_dot_product_attention, or {way_out}."
        )
    for path, module in model.named_modules():
        if path.endswith("self_attn"):
            module.register_forward_pre_hook(partial(_without_mask, sequences), with_kwargs=True)
    for module in _with_positions(model):
        module.register_forward_pre_hook(partial(_check_positions, sequences), with_kwargs=True)


def choose_rotation(word: str) -> None:
    """How keys and values of the other parts of a sequence come to this process: `"allgather"` or `"alltoall"`. Local;
    torch keeps it for the whole process.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(word)


def _without_mask(sequences: Sequences, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook. Where attention is not causal, the mask says something else, and is left as it is."""
    if sequences.is_inside and "attention_mask" in kwargs and getattr(module, "is_causal", True):
        kwargs = kwargs | {"attention_mask": None, "is_causal": True}
    return args, kwargs


def _check_positions(sequences: Sequences, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook that refuses that a model counts positions itself, in each part from 0."""
    if not sequences.is_inside:
        return
    given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    if given.get("position_ids") is None:
        raise DataError(
            f"{class_of(module).__name__} was called without position_ids inside of maybe_context_parallel, and would "
            "count them from 0 in each part of a sequence. Give them to it, and to buffers."
        )


def _with_positions(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of Hugging Face that take positions, and make their own where they get none."""
    if hasattr(module, "config") and "position_ids" in inspect.signature(type(module).forward).parameters:
        yield module
        return
    for inner in module.children():
        yield from _with_positions(inner)


def _importers(model: nn.Module) -> list[str]:
    """The files of a model's modules that have torch's attention under a name of their own."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    found = []
    for name in sorted(files):
        values = vars(sys.modules[name]).values() if name in sys.modules else ()
        if any(value is F.scaled_dot_product_attention for value in values):
            found.append(name)
    return found


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
