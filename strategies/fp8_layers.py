"""Which layers of a model compute in FP8, and layers that are made to do so where they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError
from .fp8_recipes import LayerFilter

_SHOWN_NAMES = 10
_PLAIN = "_loopwright_plain_class"
"""The attribute of a converted layer that holds its former class."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Layers of one model, by name."""

    layers: Mapping[str, nn.Linear]
    """Those that are converted."""
    odd: Mapping[str, nn.Linear]
    """Those that would be, if their sizes fitted."""


def choose_layers(
    model: nn.Module,
    multiple: int,
    *,
    accepts: LayerFilter | None = None,
    skip: Sequence[str] = (),
    first_and_last: bool = True,
) -> Choice:
    """The linear layers of a model that are converted: no subclasses, which may compute something else.

    Args:
        model: any module.
        multiple: both sizes of a layer have to be one of it.
        accepts: decides, in the place of `first_and_last`.
        skip: patterns of whole names that are left out.
        first_and_last: whether the first and the last linear layer are converted.
    Raises:
        ConfigError: a pattern matches no linear layer, or no layer is left.
    """
    linear = {name: each for name, each in model.named_modules() if type(each) is nn.Linear or is_converted(each)}
    names = list(linear)
    ends = set() if first_and_last or accepts is not None else {*names[:1], *names[-1:]}
    left_out = ends | _matching(names, skip, model)
    wanted = {
        name: layer
        for name, layer in linear.items()
        if name not in left_out and (accepts is None or accepts(layer, name))
    }
    odd = {name: each for name, each in wanted.items() if each.in_features % multiple or each.out_features % multiple}
    layers = {name: layer for name, layer in wanted.items() if name not in odd}
    if not layers:
        raise ConfigError(
            f"fp8: no layer of {type(model).__name__} is left to convert. It has {len(linear)} linear layers: "
            f"{len(ends)} are the first and the last, {len(left_out - ends)} more are skipped, and "
            f"{len(odd)} have sizes that are no multiples of {multiple}{named_sizes(odd, ': ')}. Give "
            "first_and_last=True, or other sizes, or train without fp8."
        )
    return Choice(layers, odd)


def named_sizes(layers: Mapping[str, nn.Linear], before: str = "") -> str:
    """The names and sizes of layers for a message; nothing where there are none."""
    shown = [f"{name or 'the model'} ({e.in_features} x {e.out_features})" for name, e in layers.items()]
    more = f" and {len(shown) - _SHOWN_NAMES} more" if len(shown) > _SHOWN_NAMES else ""
    return f"{before}{', '.join(shown[:_SHOWN_NAMES])}{more}" if shown else ""


def is_converted(module: nn.Module) -> bool:
    """Whether a layer was converted by `convert_layer`."""
    return _PLAIN in module.__dict__


def convert_layer(layer: nn.Module, kind: type[nn.Module], attributes: Mapping[str, Any]) -> None:
    """Let a layer be of another class, where it stands: weights, hooks, and who holds it stay. Local.

    Args:
        layer: of a class that the other one computes for; one that was converted already stays so.
        kind: the class.
        attributes: what its `forward` reads.
    """
    if is_converted(layer):
        return
    layer.__dict__[_PLAIN] = type(layer)
    layer.__dict__.update(attributes)
    layer.__class__ = kind


def restore_layer(layer: nn.Module, names: Sequence[str]) -> None:
    """Give a converted layer its class back; one that is sharded itself stays as it is. Local.

    Args:
        layer: any.
        names: of the attributes that it was given.
    """
    if not is_converted(layer) or is_sharded(layer.weight):
        return
    layer.__class__ = layer.__dict__.pop(_PLAIN)
    for name in names:
        layer.__dict__.pop(name, None)


def in_autocast_format(inputs: Tensor) -> Tensor:
    """Inputs in the format of the autocast that is on for their device, as torch's own linear layer takes them."""
    kind = inputs.device.type
    return inputs.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else inputs


class BlockScaledLinear(nn.Linear):
    """A linear layer in MXFP8, whose numbers have a factor for each block of 32.

    Rows are filled up to whole blocks, since gradients of weights are summed over them.
    """

    compute: Callable[[Tensor, Tensor], Tensor]
    """The product of inputs of shape (rows, in_features) and the weight, rows a multiple of 32."""

    def forward(self, input: Tensor) -> Tensor:
        """Outputs of shape (..., out_features) for inputs of shape (..., in_features)."""
        inputs = in_autocast_format(input)
        rows = inputs.reshape(-1, inputs.shape[-1])
        missing = -len(rows) % 32
        product = self.compute(F.pad(rows, (0, 0, 0, missing)), self.weight.to(inputs.dtype))
        outputs = product[: len(rows)].view(*inputs.shape[:-1], -1)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


def _matching(names: Sequence[str], patterns: Sequence[str], model: nn.Module) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if re.fullmatch(pattern, name)}
        if not own:
            raise ConfigError(
                f"fp8: skip={pattern!r} matches no linear layer of {type(model).__name__}. Patterns match whole names; "
                f"it has {', '.join(names[:_SHOWN_NAMES]) or 'none'}."
            )
        found |= own
    return found
