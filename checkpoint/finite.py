"""Whether weights and gradients are finite: one read from the device per question, however many tensors there are."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .sharded import local_part


def tensor_norms(tensors: Iterable[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor, as scalars on its device, in float32 or wider. Local; reads nothing from the device.

    Args:
        tensors: floating-point or complex, dense or sparse, not empty, of any shapes, dtypes and devices.
        order: the order of the norm; `math.inf` gives the largest absolute value.
    """
    dense = [_dense(tensor.detach()) for tensor in tensors]
    if not dense:
        return []
    wide = functools.reduce(torch.promote_types, (t.dtype for t in dense), torch.float32)
    return list(torch._foreach_norm(dense, order, dtype=wide))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite. Local; reads one value from each device that holds tensors.

    Of a sharded tensor this process's part is looked at.
    """
    checked = [t for t in map(local_part, tensors) if _can_be_nonfinite(t)]
    # A finite 2-norm has finite elements only. It is the fast one; finite elements of 1e20 overflow it.
    if all(math.isfinite(norm) for norm in _largest_norms(checked, 2.0)):
        return True
    return all(math.isfinite(norm) for norm in _largest_norms(checked, math.inf))


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity, in the mapping's order. Local; one read per tensor."""
    return [name for name, tensor in tensors.items() if not all_finite([tensor])]


def find_nonfinite_weight(module: nn.Module) -> str | None:
    """The name of the first weight that can't be right, None when all are. Local.

    A parameter that is trained must be finite. Frozen parameters and buffers may hold infinities, as the masks of
    attention do, but no NaN. One read from the device when all is well.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    others = {name: p for name, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())
    if all_finite([*trained.values(), *others.values()]):
        return None
    bad = nonfinite_names(trained) or [name for name, p in others.items() if bool(local_part(p).isnan().any())]
    return bad[0] if bad else None


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor.abs() if tensor.is_complex() else tensor


def _can_be_nonfinite(tensor: Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    # One-byte floats have no norm; tensors on "meta" have no values.
    return floating and tensor.dtype.itemsize > 1 and tensor.numel() > 0 and not tensor.is_meta


def _largest_norms(tensors: list[Tensor], order: float) -> list[float]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    # A maximum lets NaN through.
    return [float(torch.stack(tensor_norms(group, order)).max()) for group in by_device.values()]
