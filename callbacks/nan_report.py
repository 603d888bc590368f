"""What `NaNGuard` says: where a value went bad, in which samples, and in which module first."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.finite import all_finite, find_nonfinite_weight, nonfinite_names
from ..data.sizes import AmbiguousBatchSizeError, find_batch_size
from ..distributed.nested import named_tensors
from ..distributed.random import preserved_random_state
from .unlogged import unlogged

if TYPE_CHECKING:
    from .view import TaskView, TrainerView

_MOST_LISTED = 5


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that something was not finite."""

    what: str
    batch: Any
    """The micro-batch, None where it is over."""
    batch_idx: int
    late_step: int | None = None
    """The step that it happened in, where it is reported later."""


class Buffers:
    """Copies of a module's buffers from the start of an accumulation window; without a module there are none."""

    def __init__(self, module: Any = None) -> None:
        modules = [] if module is None else module.modules()
        self._places = [(m, name) for m in modules for name, buffer in m._buffers.items() if buffer is not None]
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.window: int | None = None
        """The window that they are from, None outside of one."""

    def keep(self, window: int) -> None:
        """Copy them, if this window is a new one."""
        if self._places and window != self.window:
            self.window = window
            # All of them: kernels such as batch norm's change buffers without counting up their version.
            buffers = [module._buffers[name] for module, name in self._places]
            self._kept = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def forget(self) -> None:
        """The window is over, or was dropped: whatever comes next is a new one."""
        self.window = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were when the window began."""
        for (module, name), (buffer, copy) in zip(self._places, self._kept, strict=True):
            module._buffers[name] = buffer.copy_(copy)


def describe(trainer: TrainerView, task: TaskView, occurrence: Occurrence, *, locate: bool) -> str:
    """One paragraph on what happened, where, and what was bad first."""
    state = trainer.state
    batch_size = _batch_size(occurrence.batch)
    is_alone = trainer.process.num_processes == 1  # the samples of several processes come in no one order
    samples = f", samples {state.samples} to {state.samples + batch_size - 1} of the run" if batch_size else ""
    where = samples if is_alone else f" of process {trainer.process.process_index}"
    place = f"(epoch {state.epoch}, batch {occurrence.batch_idx}{where})"
    if occurrence.late_step is None:
        sentences = [f"{occurrence.what} at step {state.step + 1} {place}."]
    else:
        sentences = [f"{occurrence.what} at step {occurrence.late_step}. This was seen at step {state.step} {place}."]
    if trainer.window_size > 1:
        sentences.append(f"A step takes {trainer.window_size} micro-batches, this one and those before it.")
    sentences += _bad_inputs(occurrence.batch, state.samples if is_alone else None)
    if weight := find_nonfinite_weight(trainer.unwrapped_model()):
        sentences.append(f"The weight {weight!r} is not finite itself.")
    sentences += _bad_gradients(task)
    if locate and occurrence.batch is not None and occurrence.late_step is None:
        sentences.append(_first_bad_module(trainer, task, occurrence))
    return " ".join(sentences)


def _batch_size(batch: Any) -> int | None:
    try:
        return find_batch_size(batch)
    except AmbiguousBatchSizeError:  # the report goes without
        return None


def _bad_inputs(batch: Any, samples_before: int | None) -> list[str]:
    found = []
    for name, tensor in named_tensors(batch, "batch"):
        if all_finite([tensor]):
            continue
        rows = (~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist() if tensor.ndim > 1 else []
        if tensor.ndim == 1:
            rows = (~tensor.isfinite()).nonzero().flatten().tolist()
        listed = ", ".join(str(row) for row in rows[:_MOST_LISTED]) + (", ..." if len(rows) > _MOST_LISTED else "")
        is_numbered = rows and samples_before is not None
        first = f" (the first is sample {samples_before + rows[0]} of the run)" if is_numbered else ""
        found.append(f"The input {name} is not finite itself, in rows {listed}{first}.")
    return found


def _bad_gradients(task: TaskView) -> list[str]:
    gradients = {name: p.grad for name, p in task.named_parameters() if p.grad is not None}
    bad = nonfinite_names(gradients)
    if not bad:
        return []
    # Backward goes from the last module to the first, so the last of them is the nearest to where it began.
    return [
        f"Gradients of {len(bad)} of {len(gradients)} parameters are not finite; the nearest to the loss: {bad[-1]!r}."
    ]


def _first_bad_module(trainer: TrainerView, task: Any, occurrence: Occurrence) -> str:
    """Run the batch once more and name the module whose output is not finite first."""
    if not task.automatic_optimization:
        return "The first bad module is not looked for in manual optimization."
    if not trainer.has_whole_model:
        return "The first bad module is not looked for, since each process has a part of the model alone."
    if trainer.process.num_processes > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in task.modules()):
        return "The first bad module is not looked for among SyncBatchNorm, whose forward needs all processes."
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all_finite(tensor for _, tensor in named_tensors(output)):
            good = all_finite(tensor for _, tensor in named_tensors(inputs))
            state = "its input is finite" if good else "its input is not finite already"
            found.append(f"The first module with a bad output is {name!r} ({type(module).__name__}); {state}.")

    with _without_trace(trainer, task), contextlib.ExitStack() as hooks:
        for name, module in task.named_modules():
            if name:
                handle = module.register_forward_hook(lambda m, i, o, name=name: look(name, m, i, o))
                hooks.callback(handle.remove)
        try:
            trainer.training_step(occurrence.batch, occurrence.batch_idx)
        except Exception as error:  # noqa: BLE001 - it is told in the report, which must not be lost to it
            found.append(f"A second run of this batch failed: {type(error).__name__}: {error}.")
    return found[0] if found else "No module's output was bad in a second run of this batch."


@contextlib.contextmanager
def _without_trace(trainer: TrainerView, task: Any) -> Iterator[None]:
    """Random states and buffers are put back, nothing is logged, no graph is built, and the compiler stands aside."""
    buffers = Buffers(task)
    buffers.keep(0)
    try:
        with unlogged(task), preserved_random_state(trainer.device), torch.no_grad(), _uncompiled():
            yield
    finally:
        buffers.put_back()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    # Compiled code does not see hooks that were added later. Asking would import the compiler, which takes a second.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
