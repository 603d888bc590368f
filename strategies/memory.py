"""What a strategy holds in memory, worked out before a run: its weights, gradients, optimizer state, and the peak.

The loop above traces one micro-batch on tensors without data (`TracedStep`). Each strategy replays it with what it
allocates and frees itself at the same moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.units import size_bytes
from .suitability import check_replicable
from .wrapping import NONE, WrapPolicy, find_units

BYTES, ENTER, LEAVE, BACKWARD, GRADIENT = "bytes", "enter", "leave", "backward", "gradient"
"""The kinds of events of a traced step."""


class Event(NamedTuple):
    """One moment of a step."""

    what: str
    """`BYTES`: memory is taken (or freed, below 0); `ENTER`, `LEAVE`: a unit's forward begins or ends; `BACKWARD`: its
    backward begins; `GRADIENT`: a parameter has its gradient."""
    value: int
    """Bytes; a unit's index, where one more than the last stands for the outermost; or a parameter's index."""


class TracedStep(NamedTuple):
    """What forward and backward of one micro-batch allocate, in order. Weights and gradients are not among it."""

    events: Sequence[Event]

    @property
    def highest(self) -> int:
        """The most that is held at once: activations, their gradients and intermediate values, in bytes."""
        return most_held(self.events)

    @property
    def left(self) -> int:
        """What is still held at the end, such as the loss."""
        return sum(value for what, value in self.events if what == BYTES)


@dataclass(slots=True)
class Meter:
    """A sum of bytes, and the most that it was."""

    now: int = 0
    highest: int = 0

    def add(self, size: int) -> None:
        """Take bytes, or free them (below 0)."""
        self.now += size
        self.highest = max(self.highest, self.now)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How the model computes in the step that is to be traced."""

    units: tuple[nn.Module, ...] = ()
    """Modules whose passes are noted."""
    recomputes: bool = False
    """Whether these keep no activations but their inputs."""
    keeps_outputs: bool = False
    """Whether what they give is held until the end of backward."""
    compute_format: torch.dtype | None = None
    """The format of the weights in the passes, None: their own."""
    left_alone: tuple[nn.Module, ...] = ()
    """Modules whose weights keep their own."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a strategy is planned for."""

    num_processes: int
    compute_format: torch.dtype | None = None
    """Of the run's precision, None: the model's own."""


class OptimizerMemory(NamedTuple):
    """What an optimizer holds."""

    state: int
    """Bytes that it keeps."""
    temporary: int
    """The most that one of its steps takes beside that."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned: a model on any device, "meta" included, and how it is trained."""

    model: nn.Module
    window_size: int
    """Micro-batches of a step."""
    batch_bytes: int
    """What the batches take that are on the device at once."""
    device: torch.device
    trace: Callable[[TraceOptions], TracedStep | None]
    """The step so computed; None where it can't be traced."""
    step: Callable[[Callable[[Tensor], tuple[int, ...]]], OptimizerMemory | None]
    """What the optimizer holds, if each parameter has that shape; None where it can't be stepped."""
    optimizers: Sequence[Optimizer] = ()
    """Of the run."""
    is_automatic: bool = True
    """Whether the loop steps them, and not the task."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds on its device, in bytes."""

    weights: int
    """Parameters, as they rest between steps, and buffers."""
    gradients: int
    """Of all trained parameters, when the optimizer steps."""
    optimizer: int | None
    """The optimizer's state; None: unknown."""
    activations: int | None
    """The most that forward and backward of a micro-batch hold beside all others; None: unknown."""
    peak: int | None
    """The most of a step at once; None: unknown."""
    host: int = 0
    """What lies on the host instead."""

    @property
    def known(self) -> int:
        """The peak, or what is known of it."""
        return self.peak or self.weights + self.gradients + (self.optimizer or 0) + (self.activations or 0)


class StrategyMemory(ABC):
    """What one strategy with its options will hold."""

    @property
    @abstractmethod
    def spec(self) -> Mapping[str, Any]:
        """The strategy as `Trainer(strategy=...)` takes it, with those options that are not the default."""

    def check(self, subject: Subject) -> None:
        """Refuse what the strategy is known not to serve. Local.

        Raises:
            ConfigError: says why.
        """

    @abstractmethod
    def footprint(self, subject: Subject) -> Footprint:
        """Work out what a process holds. Local.

        Raises:
            ConfigError: the strategy can't serve so many processes, or this model.
        """


@dataclass(frozen=True)
class WholeMemory(StrategyMemory):
    """Everything whole in each process.

    Attributes:
        name: the strategy's.
        options: those that are not the default.
        copies: copies of all gradients beside them, from which they are reduced.
        stays: whether gradients are part of a buffer that stays from step to step.
        recomputes: which modules keep no activations but their inputs, as `find_units` takes it.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 0
    stays: bool = False
    recomputes: WrapPolicy = NONE

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"name": self.name, **self.options}

    def check(self, subject: Subject) -> None:
        if self.name != "single":
            check_replicable(subject.model)

    def footprint(self, subject: Subject) -> Footprint:
        units = tuple(find_units(subject.model, self.recomputes))
        gradients = [size_bytes([p]) if p.requires_grad else 0 for p in subject.model.parameters()]
        weights = size_bytes(subject.model.parameters()) + size_bytes(subject.model.buffers())
        trace, step = subject.trace(TraceOptions(units, bool(units))), subject.step(lambda p: tuple(p.shape))
        peak = None
        if trace is not None and step is not None:
            peak = weights + step.state + subject.batch_bytes + self._passes(subject, gradients, trace, step)
        return Footprint(
            weights=weights,
            gradients=sum(gradients),
            optimizer=None if step is None else step.state,
            activations=None if trace is None else trace.highest,
            peak=peak,
        )

    def _passes(self, subject: Subject, gradients: Sequence[int], trace: TracedStep, step: OptimizerMemory) -> int:
        """The most that micro-batches and the optimizer's step take, gradients and their copies among it."""
        total, accumulates = sum(gradients), subject.window_size > 1
        stepping = step.temporary + trace.left
        if self.stays:
            # Until the last micro-batch they lie beside the buffer as well.
            beside = total if accumulates else 0
            return self.copies * total + total + max(beside + trace.highest, stepping)
        highest = max(most_held(trace.events, gradients), total + stepping)
        if accumulates:
            highest = max(highest, total + trace.highest)
        return self.copies * total + highest


def most_held(events: Iterable[Event], gradients: Sequence[int] | None = None) -> int:
    """The most bytes that are held at once.

    Args:
        events: of a step.
        gradients: what the gradient of each parameter takes from when it is there; None: they were there before.
    """
    meter = Meter()
    for what, value in events:
        if what == BYTES:
            meter.add(value)
        elif what == GRADIENT and gradients is not None:
            meter.add(gradients[value])
    return meter.highest


def part_of(shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """The shape of the largest part, where the first dimension is cut into equal chunks."""
    if not shape:
        return (1,)
    return (-(-shape[0] // num_parts), *shape[1:])
