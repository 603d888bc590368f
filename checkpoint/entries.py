"""The entries of a state dict: which can be stored, which are the same memory, how they are laid out for the disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..distributed.errors import CheckpointError

_UNSTORABLE = {torch.complex128, torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor that is the very same memory as an earlier one, the first name of it."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(place, name) != name:
            ties[name] = first[place]
    return ties


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors with memory of their own, as the format wants them; copies only what isn't so already."""
    users: dict[object, int] = {}
    for tensor in tensors.values():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        users[storage] = users.get(storage, 0) + 1

    def laid_out(tensor: Tensor) -> Tensor:
        shares = users[tensor.device, tensor.untyped_storage().data_ptr()] > 1 and tensor.numel() > 0
        return (tensor.to("cpu", copy=True) if shares else tensor).contiguous()

    return {name: laid_out(tensor) for name, tensor in tensors.items()}


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that safetensors can't hold.

    Raises:
        CheckpointError: names the tensor and says why.
    """
    reason = None
    if is_lazy(tensor):
        reason = "has no shape yet (a lazy module); run one batch first"
    elif tensor.is_meta:
        reason = "has no values (device meta)"
    elif tensor.layout is not torch.strided:
        reason = f"has the layout {tensor.layout}; make it dense"
    elif tensor.dtype in _UNSTORABLE:
        reason = f"has the dtype {tensor.dtype}, which safetensors does not know"
    if reason:
        raise CheckpointError(f"the weight {name!r} can't be stored: it {reason}. Nothing was written.")


def check_json(path: str, value: object) -> None:
    """Refuse a value that JSON would not give back as it is.

    Raises:
        CheckpointError: names the path of the value and its type.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"the state {path!r} has the key {key!r} of {type(key).__name__}. Expected text.")
            check_json(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(f"{path}[{index}]", item)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise CheckpointError(
            f"the state {path!r} is of type {type(value).__name__}, which can't be stored without pickle. "
            "Expected tensors, or texts, numbers, None, and lists and mappings of these. Nothing was written."
        )
