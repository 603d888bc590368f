"""The tensors of a state dict: which can be stored, and which are the same memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..distributed.errors import CheckpointError
from .sharded import is_sharded
from .stored import StoredTensor
from .tensor_file import knows_dtype


def tied_names(tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, str]:
    """For each tensor that is the very same memory as an earlier one, the first name of it."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, StoredTensor) or is_sharded(tensor) or tensor.device.type == "xla":
            place: object = id(tensor)  # it has no memory of its own; where it is tied it is the same object
        elif is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0:
            continue
        else:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(place, name) != name:
            ties[name] = first[place]
    return ties


def check_tensor(name: str, tensor: Tensor | StoredTensor) -> None:
    """Refuse a tensor that safetensors can't hold.

    Raises:
        CheckpointError: names the tensor and says why.
    """
    reason = None if isinstance(tensor, StoredTensor) else why_not_dense(tensor)
    if reason is None and not knows_dtype(tensor.dtype):
        reason = f"it has the dtype {tensor.dtype}, which safetensors does not know"
    if reason is not None:
        raise CheckpointError(f"the weight {name!r} can't be stored: {reason}. Nothing was written.")


def why_not_dense(tensor: Tensor) -> str | None:
    """Why a tensor has no dense values that could be stored, None where it has. Local."""
    if is_lazy(tensor):
        return "it has no shape yet (a lazy module); run one batch first"
    if tensor.is_meta:
        return "it has no values (device meta)"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"it has the layout {tensor.layout}; make it dense"
    return None
