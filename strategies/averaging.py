"""Tensors of several processes made equal in place: few collectives for many tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import watch
from ..distributed.errors import ConfigError
from ..distributed.positions import AVERAGING, HERE


def average(tensors: Iterable[Tensor], operation: str) -> None:
    """Replace tensors by their means over processes, with one collective per number format. Collective.

    Args:
        tensors: of the same shapes and order on all processes.
        operation: what it is for, as the watch reports it.
    """
    world = dist.get_world_size()
    with torch.no_grad(), watch.collective(operation):
        for alike in _by_format(tensors):
            flat = _flatten(alike)
            dist.all_reduce(flat)
            _restore(flat.div_(world), alike)


def average_gradients(parameters: Iterable[Tensor], operation: str, group: dist.ProcessGroup | None = None) -> None:
    """Replace gradients by their means over processes, with one collective per number format. Collective.

    A gradient that only some processes have counts as 0 in the others; one that nobody has stays None.

    Args:
        parameters: all that may have a gradient, in the same order on all processes.
        operation: what it is for, as the watch reports it.
        group: the processes; None: all.
    Raises:
        ConfigError: a gradient is sparse.
    """
    world = dist.get_world_size(group)
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in wanted):
        raise ConfigError(
            "manual optimization over several processes got a sparse gradient, which it can't average. Make the "
            "embedding with sparse=False, or use automatic optimization."
        )
    with torch.no_grad(), watch.collective(operation, AVERAGING):
        HERE.num_averagings += 1
        for alike in _by_format(wanted):
            present = [float(parameter.grad is not None) for parameter in alike]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            # Who has which gradient travels with them, at their end: numbers this small are exact in every format.
            flat = _flatten(gradients)
            flat = torch.cat([flat, torch.tensor(present, device=flat.device, dtype=flat.dtype)])
            dist.all_reduce(flat, group=group)
            counts = present if all(present) else flat[-len(alike) :].tolist()
            _restore(flat[: -len(alike)].div_(world), gradients)
            for parameter, gradient, count in zip(alike, gradients, counts, strict=True):
                parameter.grad = gradient if count else None


def broadcast_tensors(tensors: Iterable[Tensor], operation: str, group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by those of process 0, with one collective per number format. Collective.

    Args:
        tensors: of the same shapes and order on all processes.
        operation: what it is for, as the watch reports it.
        group: the processes, of which the first counts; None: all.
    """
    with torch.no_grad(), watch.collective(operation):
        for alike in _by_format(tensors):
            flat = _flatten(alike)
            dist.broadcast(flat, group=group, group_src=0)
            _restore(flat, alike)


def _by_format(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors that can be sent as one, each once although it is shared."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return flat.cpu() if flat.device.type == "xla" else flat  # XLA devices have no backend here: over the host


def _restore(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
