"""`Plan`: what a run will do, and the report on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .memory_report import MemoryPlan

_TITLES = {"log": "Log", "validation": "Validation"}
"""What is not called by its own name in the report."""


@dataclass(slots=True)
class Plan:
    """What a run will do. `str(plan)` is the report."""

    steps: int = 0
    """Optimizer steps in all."""
    batches: int = 0
    """Micro-batches in all, of each process."""
    epochs: float = 0.0
    samples: int | None = 0
    """Samples of all processes in all, None where the loader does not tell."""
    num_processes: int = 1
    samples_per_step: int | None = None
    """Samples of all processes in the first optimizer step, None where the loader does not tell."""
    batches_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    end: str = ""
    """What ends the run."""
    is_complete: bool = True
    """Whether the plan reaches the end of the run."""
    due: dict[str, list[int]] = field(default_factory=dict)
    """The optimizer steps at which something falls due: `"validation"`, `"log"`, and each callback with a schedule."""
    learning_rates: list[tuple[int, float]] = field(default_factory=list)
    """Each change of the first group's learning rate: after which step, to what."""
    callbacks: list[tuple[str, list[str]]] = field(default_factory=list)
    """The callbacks in the order in which they run, with the events that they handle."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """What callbacks will leave behind, by their names."""
    weights: dict[str, int] = field(default_factory=dict)
    """What a file of weights will hold: tensors, elements, bytes."""
    warnings: list[str] = field(default_factory=list)
    """What looks wrong."""
    memory: MemoryPlan | None = None
    """What each strategy would hold in memory, where that was asked for."""

    def __str__(self) -> str:
        parts = (_describe_processes, _describe_length, _describe_due, _describe_rest)
        lines = [line for part in parts for line in part(self)]
        return "\n".join(lines if self.memory is None else [*lines, str(self.memory)])


def _describe_processes(plan: Plan) -> list[str]:
    if plan.num_processes == 1:
        return []
    of_all = "" if plan.samples_per_step is None else f", a step takes {plan.samples_per_step:,} samples of all"
    return [f"Processes   {plan.num_processes}{of_all}; batches are those of each"]


def _describe_length(plan: Plan) -> list[str]:
    if plan.batches_per_epoch is None:
        return [f"Run         {f'{plan.steps:,}' if plan.steps else 'an unknown number of'} steps"]
    about = "" if plan.is_complete else "at least " if plan.steps else "unknown: "
    samples = "" if plan.samples is None else f", {plan.samples:,} samples"
    lines = [f"Run         {about}{plan.steps:,} steps, {plan.batches:,} batches, {plan.epochs:g} epochs{samples}"]
    if plan.end:
        lines[0] += f"; ends at {plan.end}"
    if plan.batches_per_epoch is not None:
        steps = "" if plan.steps_per_epoch is None else f", {plan.steps_per_epoch:,} steps"
        lines.append(f"Epoch       {plan.batches_per_epoch:,} batches{steps}")
    return lines


def _describe_due(plan: Plan) -> list[str]:
    lines = [f"{_TITLES.get(name, name):<11} {_steps(steps)}" for name, steps in plan.due.items()]
    if plan.learning_rates:
        shown = _shortened([f"{rate:.4g} from step {step}" for step, rate in plan.learning_rates])
        lines.append(f"{'Rate':<11} {', '.join(shown)}")
    return lines


def _describe_rest(plan: Plan) -> list[str]:
    size = plan.weights["bytes"] / 1e6
    lines = [f"Weights     {plan.weights['tensors']} tensors, {plan.weights['elements']:,} elements, {size:.2f} MB"]
    lines += [
        f"Callback    {name}: {', '.join(_shortened(events, 5)) or 'no event'}" for name, events in plan.callbacks
    ]
    lines += [f"Saves       {name}: {note}" for name, note in plan.notes]
    lines += [f"Look at     {text}" for text in plan.warnings]
    return lines


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "never"
    if len(steps) == 1:
        return f"at step {steps[0]}"
    return f"at steps {', '.join(_shortened([str(step) for step in steps]))} ({len(steps)} times)"


def _shortened(items: list[str], most: int = 8) -> list[str]:
    return items if len(items) <= most else [*items[: most - 2], "...", items[-1]]
