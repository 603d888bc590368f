"""What DeepSpeed's ZeRO holds, by formula: its own code is not traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed.units import size_bytes
from .memory import (
    Footprint,
    OptimizerMemory,
    StrategyMemory,
    Subject,
    Surroundings,
    TracedStep,
    TraceOptions,
    most_held,
)

LARGEST_BUCKET = 500_000_000
"""Elements of the buffer from which gradients are reduced, if the model has as many: DeepSpeed's default."""
MOST_LIVE = 1_000_000_000
"""Elements of weights that stage 3 keeps gathered, if the model has as many: DeepSpeed's default."""
_MASTER_BYTES = 4


def memory_of(config: Mapping[str, Any], surroundings: Surroundings) -> StrategyMemory | None:
    """What DeepSpeed would hold by a configuration; None where it spreads nothing or keeps parts elsewhere. Local."""
    zero = config["zero_optimization"]
    offloads = (zero.get(name) or {} for name in ("offload_optimizer", "offload_param"))
    if zero.get("stage") not in (1, 2, 3) or any(each.get("device", "none") != "none" for each in offloads):
        return None
    bucket = zero.get("reduce_bucket_size")
    return ZeroMemory(surroundings, zero["stage"], bucket if isinstance(bucket, int) else LARGEST_BUCKET)


@dataclass(frozen=True)
class ZeroMemory(StrategyMemory):
    """Optimizer states in parts, from stage 2 on gradients, from 3 on weights.

    Attributes:
        surroundings: what it is planned for.
        stage: of ZeRO, 1 to 3.
        bucket_elements: the most that are reduced together.
    """

    surroundings: Surroundings
    stage: int
    bucket_elements: int = LARGEST_BUCKET

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"name": "deepspeed", "zero_stage": self.stage}

    def footprint(self, subject: Subject) -> Footprint:
        sizes = _Sizes.of(self, subject)
        parts = self.surroundings.num_processes
        trace = subject.trace(TraceOptions(compute_format=self.surroundings.compute_format))
        step = subject.step(lambda parameter: (-(-parameter.numel() // parts),))
        peak = None if trace is None or step is None else self._peak(subject, sizes, trace, step)
        is_cut = self.stage == 3
        return Footprint(
            weights=(sizes.whole // parts if is_cut else sizes.whole) + sizes.masters + sizes.buffers,
            gradients=sizes.gradients if self.stage == 1 else sizes.gradients // parts,
            optimizer=None if step is None else step.state,
            activations=None if trace is None else trace.highest,
            peak=peak,
        )

    def _peak(self, subject: Subject, sizes: _Sizes, trace: TracedStep, step: OptimizerMemory) -> int:
        parts, window = self.surroundings.num_processes, subject.window_size
        base = sizes.buffers + sizes.masters + step.state + subject.batch_bytes
        part = sizes.gradients // parts
        temporary = step.temporary * sizes.trained // max(1, sizes.largest)  # it steps one flat tensor
        own_step = sizes.trained * _MASTER_BYTES // parts + max(2 * part, temporary) + trace.left
        if self.stage == 3:
            base += sizes.whole // parts + sizes.live
            return base + max(part + sizes.bucket + max(sizes.bucket, trace.highest), own_step)
        # On the CPU the weights from which the flat ones were made stay.
        base += sizes.whole * (2 if subject.device.type == "cpu" else 1)
        backward, reduction = most_held(trace.events, sizes.each), sizes.bucket
        if window > 1:
            later = sizes.gradients + trace.highest if self.stage == 1 else part + backward
            backward = max(backward, later)
        if self.stage == 2 or window > 1:
            reduction += part
        return base + max(sizes.bucket + max(backward, reduction), own_step)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """In bytes, but for elements."""

    buffers: int
    whole: int
    """All weights in the format of the passes."""
    live: int
    """Those of them that stage 3 keeps gathered."""
    masters: int
    """This process's part of the trained ones in fp32."""
    trained: int
    """Elements of these."""
    largest: int
    """Those of the largest parameter among them."""
    each: list[int]
    """The gradient of each parameter."""
    bucket: int
    """The buffer from which gradients are reduced."""

    @property
    def gradients(self) -> int:
        """All of them."""
        return sum(self.each)

    @classmethod
    def of(cls, memory: ZeroMemory, subject: Subject) -> _Sizes:
        computes = memory.surroundings.compute_format
        parameters = list(subject.model.parameters())

        def width(dtype: torch.dtype) -> int:
            return computes.itemsize if computes is not None and dtype.is_floating_point else dtype.itemsize

        each = [p.numel() * width(p.dtype) if p.requires_grad else 0 for p in parameters]
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        count = sum(p.numel() for p in parameters)
        whole = sum(p.numel() * width(p.dtype) for p in parameters)
        return cls(
            buffers=size_bytes(subject.model.buffers()),
            whole=whole,
            live=whole * min(count, MOST_LIVE) // max(1, count),
            masters=trained * _MASTER_BYTES // memory.surroundings.num_processes,
            trained=trained,
            largest=max((p.numel() for p in parameters if p.requires_grad), default=0),
            each=each,
            bucket=sum(each) * min(trained, memory.bucket_elements) // max(1, trained),
        )
