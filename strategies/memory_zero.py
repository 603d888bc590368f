"""What DeepSpeed's ZeRO holds: its own code is not traced, so what it allocates beside the step is worked out here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..distributed.errors import ConfigError
from ..distributed.units import size_bytes
from .deepspeed_config import offload_of
from .deepspeed_limits import check_steps_rows
from .deepspeed_options import DeepSpeedOptions
from .memory import Footprint, OptimizerMemory, StrategyMemory, Subject, Surroundings, TracedStep, TraceOptions
from .memory_buckets import BucketReplay, Rows, forward_highest, part_reduction
from .suitability import check_replicable

LARGEST_BUCKET = 500_000_000
"""Elements of the buffer from which gradients are reduced, if the model has as many: DeepSpeed's default."""
_REUSE = 1_000_000_000
"""Elements within which stage 3 keeps weights that are used again: DeepSpeed's default."""
_PREFETCH = 50_000_000
"""Elements that stage 3 gathers ahead: DeepSpeed's default."""
_PERSISTENCE = 100_000
"""The most elements of a weight that stage 3 leaves gathered: DeepSpeed's default."""
_SUB_GROUP = 1_000_000_000
"""Elements that stage 3 steps at a time: DeepSpeed's default."""
_MASTER_BYTES = 4
_NUMBERS = (
    ("bucket_elements", "reduce_bucket_size"),
    ("reuse_elements", "stage3_max_reuse_distance"),
    ("prefetch_elements", "stage3_prefetch_bucket_size"),
    ("persistence_elements", "stage3_param_persistence_threshold"),
    ("sub_group_elements", "sub_group_size"),
)
"""Attributes of `ZeroMemory`, and what they are in DeepSpeed's configuration."""


def memory_of(options: DeepSpeedOptions, surroundings: Surroundings) -> StrategyMemory | None:
    """What DeepSpeed would hold by its options; None where it spreads nothing or keeps parts elsewhere. Local."""
    zero = options.config["zero_optimization"]
    if options.stage == 0 or any(offload_of(options.config, what) != "none" for what in ("optimizer", "param")):
        return None
    numbers = {name: int(value) for name, key in _NUMBERS if isinstance(value := zero.get(key), (int, float))}
    return ZeroMemory(surroundings, options.stage, options=options, **numbers)


@dataclass(frozen=True)
class ZeroMemory(StrategyMemory):
    """Optimizer states in parts, from stage 2 on gradients, from 3 on weights.

    Attributes:
        surroundings: what it is planned for.
        stage: of ZeRO, 1 to 3.
        bucket_elements: of the buffer from which gradients are reduced; None: as many as the model has, at most
            `LARGEST_BUCKET`.
        reuse_elements: within which weights are kept that are used again, at stage 3.
        prefetch_elements: that are gathered ahead, at stage 3.
        persistence_elements: the most of a weight that stays gathered, at stage 3.
        sub_group_elements: that are stepped at a time, at stage 3.
        options: the user's; None: the defaults.
    """

    surroundings: Surroundings
    stage: int
    bucket_elements: int | None = None
    reuse_elements: int = _REUSE
    prefetch_elements: int = _PREFETCH
    persistence_elements: int = _PERSISTENCE
    sub_group_elements: int = _SUB_GROUP

    options: DeepSpeedOptions | None = None

    @property
    def spec(self) -> Mapping[str, Any]:
        given = {} if self.options is None else self.options.given(self.stage)
        return {"name": "deepspeed", "zero_stage": self.stage, **given}

    def check(self, subject: Subject) -> None:
        if not subject.is_automatic:
            raise ConfigError("DeepSpeed can't serve manual optimization. Use automatic optimization, or 'ddp'.")
        if len(subject.optimizers) > 1:
            raise ConfigError(f"DeepSpeed steps one optimizer, and there are {len(subject.optimizers)}.")
        check_replicable(subject.model)
        for optimizer in subject.optimizers:
            check_steps_rows(optimizer, subject.model, self.stage)

    def footprint(self, subject: Subject) -> Footprint:
        sizes = _Sizes.of(self, subject)
        trace = subject.trace(TraceOptions(compute_format=self.surroundings.compute_format))
        step = subject.step(sizes.stepped_shape)
        passes: int | None = None
        if trace is not None and step is not None:
            held = self._parted if self.stage == 3 else self._whole
            passes = held(subject, sizes, trace, step)
        return Footprint(
            weights=sizes.resting + sizes.masters + sizes.buffers,
            gradients=sizes.gradients if self.stage == 1 else sizes.part * sizes.width,
            optimizer=None if step is None else step.state,
            activations=None if trace is None else trace.highest,
            peak=None
            if passes is None or step is None
            else sizes.buffers + sizes.masters + step.state + subject.batch_bytes + passes,
        )

    def _whole(self, subject: Subject, sizes: _Sizes, trace: TracedStep, step: OptimizerMemory) -> int:
        """The most that weights, gradients, passes and the step take where weights are whole."""
        # On the CPU the weights from which the flat ones were made stay.
        weights = sizes.whole * (2 if subject.device.type == "cpu" else 1)
        highest = 0
        num_parts = self.surroundings.num_processes
        for part in {0, num_parts // 2, num_parts - 1}:
            replay = BucketReplay(sizes.rows, part, sizes.width, sizes.bucket, spreads=self.stage == 2)
            passes = replay.highest(trace, subject.window_size)
            waiting = replay.kept - replay.kept * sizes.row // max(1, sizes.part)  # gradients of other rows
            stepping = max(replay.kept + sizes.putting(sizes.row), waiting + sizes.stepping(step, sizes.row))
            highest = max(highest, passes, trace.left + stepping)
        return weights + highest

    def _parted(self, subject: Subject, sizes: _Sizes, trace: TracedStep, step: OptimizerMemory) -> int:
        """The same where each process has parts of the weights, and the buffers all the time."""
        width = sizes.width
        each = {index: elements * width for index, elements in sizes.rows.elements.items()}
        passes = part_reduction(trace, each, sizes.bucket * width)
        live = min(sizes.count, self.reuse_elements // 2 + self.prefetch_elements + sizes.largest + sizes.persistent)
        # What is gathered together lies in one buffer until the last of it is computed with, and beside it.
        ahead = self.prefetch_elements + sizes.largest if self.prefetch_elements else 0
        buffer = min(sizes.count - sizes.persistent, ahead) * width
        gathering = forward_highest(trace) if live == sizes.count else passes
        row = min(sizes.part, self.sub_group_elements)
        stepping = trace.left + max(sizes.putting(row), sizes.stepping(step, row))
        return (
            sizes.resting
            + (sizes.part + sizes.bucket) * width
            + max(live * width + max(passes, buffer + gathering), stepping)
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a model takes under a stage, in bytes, but for elements."""

    buffers: int
    whole: int
    """All weights in the format of the passes."""
    count: int
    """Elements of these."""
    largest: int
    """Elements of the largest."""
    persistent: int
    """Elements of those that stage 3 leaves gathered."""
    width: int
    """Of an element of a gradient."""
    rows: Rows
    resting: int
    """Weights between steps, without those in full precision."""
    part: int
    """Elements of this process's part of the trained weights."""
    row: int
    """Those of them that are stepped together."""
    bucket: int
    """Elements of the buffer from which gradients are reduced."""
    firsts: Mapping[int, int] = field(default_factory=dict)
    """Elements that stand for a whole row in the optimizer, by the `id` of its first parameter."""

    @property
    def gradients(self) -> int:
        """All of them."""
        return sum(self.rows.elements.values()) * self.width

    @property
    def masters(self) -> int:
        """This process's part of the trained weights in full precision."""
        return self.part * _MASTER_BYTES

    def putting(self, elements: int) -> int:
        """What it takes to put so many elements of gradients into a row, in full precision."""
        return elements * (self.width + (0 if self.width == _MASTER_BYTES else _MASTER_BYTES))

    def stepping(self, step: OptimizerMemory, elements: int) -> int:
        """What such a row takes while the optimizer steps it, with what that takes itself."""
        return elements * _MASTER_BYTES + step.temporary

    def stepped_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape that stands for a parameter in the optimizer, which steps a row at a time."""
        return (self.firsts.get(id(parameter), 0),)

    @classmethod
    def of(cls, memory: ZeroMemory, subject: Subject) -> _Sizes:
        computes = memory.surroundings.compute_format
        num_parts = memory.surroundings.num_processes
        parameters = list(subject.model.parameters())
        groups = _groups_of(subject, parameters)

        def width(dtype: torch.dtype) -> int:
            return computes.itemsize if computes is not None and dtype.is_floating_point else dtype.itemsize

        is_cut = memory.stage == 3
        rows = Rows([[(index, p.numel()) for index, p in group] for group in groups], num_parts)
        cut = [sum(-(-p.numel() // num_parts) for _, p in group) for group in groups]
        parts = cut if is_cut else rows.parts
        whole = sum(p.numel() * width(p.dtype) for p in parameters)
        count = sum(p.numel() for p in parameters)
        return cls(
            buffers=size_bytes(subject.model.buffers()),
            whole=whole,
            count=count,
            largest=max((p.numel() for p in parameters), default=0),
            persistent=sum(p.numel() for p in parameters if p.numel() <= memory.persistence_elements),
            width=max((width(p.dtype) for group in groups for _, p in group), default=_MASTER_BYTES),
            rows=rows,
            resting=sum(-(-p.numel() // num_parts) * width(p.dtype) for p in parameters) if is_cut else whole,
            part=sum(parts),
            row=max(parts, default=0),
            bucket=memory.bucket_elements or max(1, min(LARGEST_BUCKET, count)),
            firsts={id(group[0][1]): size for group, size in zip(groups, parts, strict=True)},
        )


def _groups_of(subject: Subject, parameters: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """The trained parameters of each of the optimizer's groups, with their index in the model."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    given = [group["params"] for optimizer in subject.optimizers for group in optimizer.param_groups] or [parameters]
    found = [[(index_of[id(p)], p) for p in group if p.requires_grad and id(p) in index_of] for group in given]
    return [group for group in found if group]
