"""One model in torch's `DistributedDataParallel`: made, found again, and its errors in terms of its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.names import MethodForward, plain_names, wrapped_attribute
from ..distributed.errors import DistributedError

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute with which a model tells torch's DDP what to leave alone."""

_AT_BACKWARD = "_loopwright_iterations_at_backward"
"""The attribute of a wrapper that holds how many forward passes there had been at its newest backward."""

_UNUSED = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
_READY_TWICE = re.compile(r"Parameter at index (\d+)\D.* marked as ready twice")
_SHOWN_NAMES = 10


class _Method(MethodForward):
    """What a replica calls. Nobody but the replica has it, and so there are no hooks that a call would have to run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def replicate(
    model: nn.Module, method: str, device: torch.device, options: Mapping[str, Any]
) -> DistributedDataParallel:
    """A model whose gradients are averaged in backward; all begin with the weights of process 0. Collective.

    Args:
        model: on its device, with a trainable parameter.
        method: the method whose calls are forward passes.
        device: where inputs are moved; the CPU leaves them where they are.
        options: arguments of `DistributedDataParallel`.
    """
    if method != "forward":
        ignored = {f"module.{name}" for name in getattr(model, _IGNORED, ())}
        model = _Method(model, method)
        if ignored:
            setattr(model, _IGNORED, ignored)
    # A method other than forward gets what the loop has moved already, of any type.
    moves = device.type != "cpu" and method == "forward"
    return DistributedDataParallel(model, device_ids=[device] if moves else None, **_as_torch_calls_them(options))


def find_replica(model: nn.Module) -> DistributedDataParallel | None:
    """The data-parallel wrapper around a model, also inside of the compiler's; None where there is none. Local."""
    while not isinstance(model, DistributedDataParallel):
        attribute = wrapped_attribute(model)
        if attribute is None:
            return None
        model = getattr(model, attribute)
    return model


def must_reduce(replica: DistributedDataParallel) -> bool:
    """Whether the next backward has to be reduced, since torch records a static graph in the first that is. Local.

    A window that begins so has the same sum: the mean of one micro-batch is the same wherever it is taken.
    """
    return replica.static_graph and not replica._static_graph_delay_allreduce_enqueued


def note_backward(replica: DistributedDataParallel) -> None:
    """Note that the loss of the newest forward pass has gone backward. Local."""
    module = replica._modules["module"]
    if isinstance(module, MethodForward):
        replica.__dict__[_AT_BACKWARD] = module.num_calls


def num_forward_passes(replica: DistributedDataParallel) -> int:
    """Forward passes so far, known where another method than forward is called; else 0. Local."""
    module = replica._modules["module"]
    return module.num_calls if isinstance(module, MethodForward) else 0


def has_open_forward(replica: DistributedDataParallel) -> bool:
    """Whether the newest forward pass has had no backward, since its loss was left out. Local.

    It is known where another method than forward is called, as the Trainer does.
    """
    module = replica.module
    return isinstance(module, MethodForward) and bool(module.num_calls != replica.__dict__.get(_AT_BACKWARD, 0))


def trained_names(replica: DistributedDataParallel) -> list[str]:
    """The names of the parameters that are reduced, in the order of the numbers in torch's errors. Local."""
    ignored = replica.parameters_to_ignore
    names = [n for n, p in replica.module.named_parameters() if p.requires_grad and n not in ignored]
    return list(plain_names(replica.module, names).values())


def check_reduced(replica: DistributedDataParallel) -> None:
    """Refuse to go on where a backward pass has left gradients that were not averaged. Local.

    torch would notice at the next forward pass, one wrong optimizer step later.

    Raises:
        DistributedError: names the parameters that had no part in the loss.
    """
    try:
        replica._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise translated(error, replica) or error from error


def translated(error: RuntimeError, replica: DistributedDataParallel) -> DistributedError | None:
    """What torch says of this model's reduction, with the names of parameters; None for any other error. Local."""
    text = str(error)
    if (unused := _UNUSED.search(text)) is not None:
        return DistributedError(
            f"{_named(replica, unused[1].split())} had no part in the loss, so that the gradients of this step are not "
            "averaged over processes. Use them, set requires_grad=False, or let DDP look for them in each step: "
            "strategy={'name': 'ddp', 'find_unused_parameters': True}; under Accelerator, "
            "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]."
        )
    if (twice := _READY_TWICE.search(text)) is not None:
        return DistributedError(
            f"{_named(replica, [twice[1]])} got its gradient twice in one backward pass, after it was averaged. Use "
            "torch.utils.checkpoint with use_reentrant=False, call forward once for each backward, or say that each "
            "step is alike: strategy={'name': 'ddp', 'static_graph': True}."
        )
    return None


def zero_loss(parameters: list[Tensor]) -> Tensor:
    """A loss of 0 in which each parameter has a part, with gradients of 0, also where a weight is not finite. Local."""
    keep = torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    return torch.stack([torch.where(keep, parameter, 0).sum().float() for parameter in parameters]).sum()


def _named(replica: DistributedDataParallel, indices: list[str]) -> str:
    names = trained_names(replica)
    found = [names[int(index)] for index in indices]
    more = f" and {len(found) - _SHOWN_NAMES} more" if len(found) > _SHOWN_NAMES else ""
    word = "parameter" if len(found) == 1 else "parameters"
    return f"{word} {', '.join(found[:_SHOWN_NAMES])}{more} of {type(_model_of(replica)).__name__}"


def _model_of(replica: DistributedDataParallel) -> nn.Module:
    return replica.module.module if isinstance(replica.module, MethodForward) else replica.module


def _as_torch_calls_them(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the names of the installed torch, which has renamed one."""
    renamed = {"broadcast_buffers": "forward_sync_buffers"}
    known = inspect.signature(DistributedDataParallel).parameters
    return {new if (new := renamed.get(name, name)) in known else name: value for name, value in options.items()}
