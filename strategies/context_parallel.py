"""Attention over sequences of which each process has a part: what models have to leave out for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..distributed.errors import ConfigError


def prepare_attention(model: nn.Module) -> None:
    """Let the modules that are called `self_attn`, as those of Hugging Face are, go without their masks. Local.

    torch cuts plain causal attention alone over sequences; a mask would have the shape of whole ones.

    Raises:
        ConfigError: layers attend to less than all that came before, which their masks would say.
    """
    if others := _narrow_layers(model):
        raise ConfigError(
            f"{type(model).__name__} has attention of kind {', '.join(others)}, and context parallelism has no masks "
            "but the causal one. Use a model of full attention, or leave context out of the mesh (cp_size=1)."
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
