"""Moving batches to a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def send_to_device(data: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move every tensor of a nested structure. Local.

    Args:
        data: tensors, or tuples, named tuples, lists, mappings and dataclasses of them, or objects with their own `to`
            (such as a tokenizer's output). Anything else passes unchanged; the caller's containers are not changed.
        device: where to.
        non_blocking: let the copy go on in the background where the memory is pinned.
        skip_keys: keys of mappings whose values stay where they are.
    Returns:
        The same nesting, of the same types.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, (str, bytes, int, float, type(None))):
        return data
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def move(value: Any) -> Any:
        return send_to_device(value, device, non_blocking, skipped)

    if isinstance(data, Mapping):
        moved = {key: value if key in skipped else move(value) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple):
        items = [move(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, list):
        return type(data)(move(value) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return dataclasses.replace(
            data, **{f.name: move(getattr(data, f.name)) for f in dataclasses.fields(data) if f.init}
        )
    if callable(own := getattr(data, "to", None)) and not isinstance(data, torch.nn.Module):
        return own(device)
    return data
