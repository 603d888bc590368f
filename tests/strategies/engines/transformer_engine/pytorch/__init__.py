from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import fp8

__all__ = ["LayerNorm", "Linear", "fp8", "fp8_autocast", "state"]

state: dict[str, Any] = {"enabled": False, "recipe": None}
"""What the innermost context has set."""


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
    before = dict(state)
    state.update(enabled=enabled, recipe=fp8_recipe)
    try:
        yield
    finally:
        state.update(before)


class _Keeps:
    computed: list[bool]

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_extra_state(self, value: Any) -> None:
        pass


class Linear(_Keeps, nn.Module):
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, device: Any = "cuda"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype)) if bias else torch.Tensor()
        self.computed = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.computed.append(state["enabled"])
        return nn.functional.linear(inputs, self.weight, self.bias if self.bias.numel() else None)


class LayerNorm(_Keeps, nn.Module):
    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, params_dtype: Any = None, device: Any = "cuda"
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)
