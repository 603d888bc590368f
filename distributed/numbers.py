"""From tensors on their devices to plain numbers, exactly and with few copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = "int | float"


def to_numbers(values: Mapping[str, Any]) -> dict[str, Number]:
    """Plain numbers of tensors and numbers, with one copy to the host for each device and kind. Local.

    This is where one waits for the device: call it seldom.

    Args:
        values: tensors of one element, numbers, and None, which is left out.
    Returns:
        The names in the same order; integers and booleans of tensors are integers and exact, floats have 64 bits.
    """
    numbers: dict[str, Number] = {}
    groups: dict[tuple[torch.device, bool], list[str]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            groups.setdefault((value.device, value.is_floating_point()), []).append(name)
            numbers[name] = 0  # holds the place, so that the order of names is kept
        elif value is not None:
            numbers[name] = value
    for (device, _), names in groups.items():
        stacked = stack_wide([values[name].detach().reshape(()) for name in names], device)
        numbers.update(zip(names, stacked.tolist(), strict=True))
    return numbers


def stack_wide(values: Sequence[Any], device: torch.device) -> Tensor:
    """Scalar tensors and numbers as one tensor of shape (values,) on a device, wide enough to add them up. Local.

    Args:
        values: at least one; tensors of shape () on `device`, or numbers.
        device: where the result is.
    Returns:
        int64 where all are integers or booleans, else the type of `wide_float`.
    """
    wide = wide_float(device)
    if not any(isinstance(value, Tensor) for value in values):
        dtype = wide if any(isinstance(value, float) for value in values) else None
        stacked = torch.tensor(values, dtype=dtype, device=device)
    else:
        tensors = [value if isinstance(value, Tensor) else _scalar(value, device) for value in values]
        if len({tensor.dtype for tensor in tensors}) > 1:
            common = wide if any(tensor.is_floating_point() for tensor in tensors) else torch.int64
            tensors = [tensor.to(common) for tensor in tensors]
        stacked = torch.stack(tensors)
    return stacked.to(wide if stacked.is_floating_point() else torch.int64)


def wide_float(device: torch.device) -> torch.dtype:
    """The widest type of floats that a device has: float64, and float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def _scalar(value: Any, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=wide_float(device) if isinstance(value, float) else None, device=device)
