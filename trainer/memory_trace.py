"""One micro-batch of a task, run on tensors that have shapes and no data, with all that it allocates noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.errors import TaskError
from ..distributed.nested import recursively_apply
from ..distributed.random import preserved_random_state
from ..strategies.memory import BACKWARD, ENTER, GRADIENT, LEAVE, TracedStep, TraceOptions
from ..strategies.memory_log import AllocationLog, fake_like, tensors_of
from ..strategies.recompute import recompute
from .modes import attribute_set, training_mode
from .task import Task


def trace_step(
    task: Task, step: Callable[[Any, int], Any], batch: Any, device: torch.device, options: TraceOptions
) -> TracedStep:
    """Run forward and backward of one batch without data. The task is as before afterwards. Local.

    Args:
        task: on any device, "meta" included.
        step: its `training_step`, in the run's precision.
        batch: whose shapes are taken.
        device: where the step would run.
        options: how the model computes.
    Raises:
        TaskError: the step gave no loss.
        Exception: what the step raises on tensors without data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(preserved_random_state(device))
        stack.enter_context(training_mode(task))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        weights = stack.enter_context(_without_data(task, device, options))
        stack.enter_context(attribute_set(task, "log", lambda *args, **kwargs: None))  # no run is there to take it
        if options.recomputes:
            stack.enter_context(_recomputing(options.units))
        given = recursively_apply(lambda tensor: fake_like(tensor, device), batch)
        log = AllocationLog(device, [*weights, *task.buffers(), *tensors_of(given)])
        kept = stack.enter_context(_watching(log, weights, options))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(log)
        outermost = len(options.units)
        log.mark(ENTER, outermost)
        outputs = step(given, 0)
        log.mark(LEAVE, outermost)
        loss = _loss_of(outputs)
        log.mark(BACKWARD, outermost)
        loss.backward()  # type: ignore[no-untyped-call]
        kept.clear()
        return TracedStep(tuple(log.events))  # what the step gave is held until here, as in a run


def _loss_of(outputs: Any) -> Tensor:
    """The loss among what a step gave."""
    if isinstance(outputs, Mapping):
        return _loss_of(outputs.get("loss"))
    loss = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    if not isinstance(loss, Tensor):
        raise TaskError(f"training_step gave {type(outputs).__name__} for the first batch, and no loss.")
    return loss


@contextmanager
def _without_data(task: nn.Module, device: torch.device, options: TraceOptions) -> Iterator[list[nn.Parameter]]:
    """A context in which the tensors of a module are on a device and have no data. Gives the parameters in order."""
    left = {id(p) for module in options.left_alone for p in module.parameters()}
    made: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            computes = options.compute_format if tensor.is_floating_point() and id(tensor) not in left else None
            is_weight = isinstance(tensor, nn.Parameter)
            fake = fake_like(tensor.detach(), device, computes if is_weight else None)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
        return made[id(tensor)]

    parameters = list(task.parameters())
    with ExitStack() as stack:
        for module in list(task.modules()):
            stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for store in stores:
                for name, value in list(store.items()):
                    if isinstance(value, Tensor):
                        stack.callback(store.__setitem__, name, value)
                        store[name] = replacement(value)
        yield [made[id(parameter)] for parameter in parameters]  # type: ignore[misc]


@contextmanager
def _recomputing(units: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which units keep no activations."""
    before = [(unit, unit.__dict__.get("forward")) for unit in units]
    for unit, _ in before:
        recompute(unit)
    try:
        yield
    finally:
        for unit, own in before:
            if own is None:
                del unit.forward
            else:
                unit.forward = own


@contextmanager
def _watching(log: AllocationLog, weights: list[nn.Parameter], options: TraceOptions) -> Iterator[list[Tensor]]:
    """A context in which the passes of units, and gradients, are noted. Gives what is held until backward has ended."""
    handles = [
        weight.register_post_accumulate_grad_hook(_taking(log, index))  # type: ignore[no-untyped-call]
        for index, weight in enumerate(weights)
        if weight.requires_grad
    ]
    kept: list[Tensor] = []
    for index, unit in enumerate(options.units):
        entering = _entering(log, index, options.compute_format)
        handles.append(unit.register_forward_pre_hook(entering, with_kwargs=True))
        handles.append(unit.register_forward_hook(_leaving(log, index, kept if options.keeps_outputs else None)))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _taking(log: AllocationLog, index: int) -> Callable[[Tensor], None]:
    def take(weight: Tensor) -> None:
        if weight.grad is not None:
            log.hand_over(weight.grad)
            log.mark(GRADIENT, index)
            weight.grad = None

    return take


def _entering(log: AllocationLog, index: int, computes: torch.dtype | None) -> Callable[..., Any]:
    def enter(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        log.mark(ENTER, index)
        if computes is None:
            return None
        return recursively_apply(
            lambda tensor: tensor.to(computes) if tensor.is_floating_point() else tensor, (args, kwargs)
        )

    return enter


def _leaving(log: AllocationLog, index: int, kept: list[Tensor] | None) -> Callable[..., None]:
    def leave(unit: nn.Module, args: Any, outputs: Any) -> None:
        log.mark(LEAVE, index)
        for output in tensors_of(outputs):
            if output.requires_grad:
                output.register_hook(lambda _: log.mark(BACKWARD, index))  # type: ignore[no-untyped-call]
                if kept is not None:
                    kept.append(output)

    return leave
