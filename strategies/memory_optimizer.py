"""What an optimizer holds: it is stepped on tensors without data."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .memory import OptimizerMemory, most_held
from .memory_log import AllocationLog, tensors_of

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def optimizer_memory(
    optimizer: Optimizer, shape_of: Callable[[Tensor], tuple[int, ...]], device: torch.device
) -> OptimizerMemory:
    """What an optimizer keeps, and what a step takes beside that. It is not changed. Local.

    Args:
        optimizer: over parameters on any device.
        shape_of: the shape that a process has of each trained parameter.
        device: where they are to be.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = _twin(optimizer, shape_of, device)
        parameters = [parameter for group in twin.param_groups for parameter in group["params"]]
        _step(twin, parameters, device)  # makes the state
        state = _stored_bytes(_states(twin), device)
        log = _step(twin, parameters, device)
    return OptimizerMemory(state, most_held(log.events))


def _twin(optimizer: Optimizer, shape_of: Callable[[Tensor], tuple[int, ...]], device: torch.device) -> Optimizer:
    """An optimizer with the same settings over parameters without data, and no state."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler counts its calls
    for hooks in _HOOKS:
        twin.__dict__[hooks] = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [_twin_group(group, shape_of, device) for group in optimizer.param_groups]
    return twin  # type: ignore[no-any-return]


def _twin_group(
    group: dict[str, Any], shape_of: Callable[[Tensor], tuple[int, ...]], device: torch.device
) -> dict[str, Any]:
    made = [
        nn.Parameter(torch.empty(shape_of(p), dtype=p.dtype, device=device)) for p in group["params"] if p.requires_grad
    ]
    twin = {**group, "params": made}
    if device.type == "cuda" and twin.get("foreach", False) is None and not twin.get("fused"):
        twin["foreach"] = True  # torch's own choice there, which it does not make for these tensors
    return twin


def _step(optimizer: Optimizer, parameters: Iterable[Tensor], device: torch.device) -> AllocationLog:
    chosen = list(parameters)
    for parameter in chosen:
        parameter.grad = torch.empty_like(parameter)
    known = [*chosen, *_states(optimizer)]
    log = AllocationLog(device, [*known, *(p.grad for p in chosen if p.grad is not None)], reads_all=True)
    with log, torch.no_grad():
        optimizer.step()
    return log


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    return tensors_of(list(optimizer.state.values()))


def _stored_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """What the storages of those tensors take that are on a device of this kind; one that several share counts once."""
    found = {id(t.untyped_storage()): t for t in tensors if t.device.type == device.type}
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
