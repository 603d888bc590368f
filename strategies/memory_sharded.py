"""What `fully_shard` holds: parts of the weights, and whole units while they are computed with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.errors import ConfigError
from ..distributed.meshes import MeshSizes
from ..distributed.units import size_bytes
from .memory import (
    Footprint,
    OptimizerMemory,
    StrategyMemory,
    Subject,
    Surroundings,
    TracedStep,
    TraceOptions,
    WholeMemory,
    part_of,
)
from .memory_replay import Replay, UnitSizes
from .optimizer_limits import check_steps_parts
from .registry import FSDP, create_strategy
from .sharded_options import ShardedOptions
from .sharding import find_ignored, owned_parameters, whole_parameters
from .suitability import check_replicable
from .wrapping import AUTO, NONE, WrapPolicy, find_units

_FULL = torch.float32
_PLANNED = ("reshard_after_forward", "cpu_offload", "activation_checkpointing", "activation_offload")
"""Options that a plan chooses."""


def memory_of(options: ShardedOptions, mesh: MeshSizes | None, surroundings: Surroundings) -> StrategyMemory | None:
    """What `FSDPStrategy` would hold; None where layers or sequences are cut as well. Local."""
    given = _given(options)
    if surroundings.num_processes == 1:
        return WholeMemory("fsdp", given, recomputes=options.wrap if options.activation_checkpointing else NONE)
    if mesh is not None and mesh.tensor * mesh.parts_of_sequences > 1:
        return None
    return ShardedMemory(
        surroundings,
        mesh,
        wrap=options.wrap,
        reshard_after_forward=options.reshard_after_forward,
        cpu_offload=options.cpu_offload,
        activation_checkpointing=options.activation_checkpointing,
        prefetch=options.prefetch,
        ignored_modules=options.ignored_modules,
        compute_format=options.compute_format(surroundings.compute_format),
        reduce_format=options.reduce_format(surroundings.compute_format),
        given=given,
    )


def _given(options: ShardedOptions) -> dict[str, Any]:
    """The options that are not the default, by name."""
    usual = create_strategy(FSDP).options  # type: ignore[attr-defined]
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


@dataclass(frozen=True)
class ShardedMemory(StrategyMemory):
    """A part of each weight in each process.

    Attributes:
        surroundings: what it is planned for.
        mesh: copies and parts; None: as many parts as processes.
        wrap, reshard_after_forward, cpu_offload, activation_checkpointing, prefetch, ignored_modules: as `FSDPStrategy`
            takes them.
        compute_format: in which units compute; None: as the weights are.
        reduce_format: in which gradients are reduced; None: as they come.
        given: the user's options that are not the default.
    """

    surroundings: Surroundings
    mesh: MeshSizes | None = None
    wrap: WrapPolicy = AUTO
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    prefetch: int = 0
    ignored_modules: Sequence[str | nn.Module] = ()
    compute_format: torch.dtype | None = None
    reduce_format: torch.dtype | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Mapping[str, Any]:
        kept = {name: value for name, value in self.given.items() if name not in _PLANNED}
        found: dict[str, Any] = {"name": FSDP, **kept}
        if self.mesh is not None:
            sizes = self.mesh.filled(self.surroundings.num_processes)
            found["mesh"] = {"replicate": sizes.replicate, "shard": sizes.shard}
        if not self.reshard_after_forward:
            found["reshard_after_forward"] = False
        for option in ("activation_checkpointing", "cpu_offload"):
            if getattr(self, option):
                found[option] = True
        if self.activation_checkpointing and "activation_offload" in self.given:
            found["activation_offload"] = True
        return found

    def check(self, subject: Subject) -> None:
        if not subject.is_automatic:
            raise ConfigError("strategy='fsdp' can't serve manual optimization. Use automatic optimization, or 'ddp'.")
        check_replicable(subject.model)
        check_steps_parts(subject.optimizers, FSDP)

    def footprint(self, subject: Subject) -> Footprint:
        mesh = (self.mesh or MeshSizes()).filled(self.surroundings.num_processes)
        parts = mesh.shard or 1
        model = subject.model
        ignored = find_ignored(model, self.ignored_modules)
        units = find_units(model, self.wrap, ignored)
        left = {id(p): p for p in (getattr(module, name) for module, name in whole_parameters(model, ignored))}
        whole = size_bytes(left.values()) + size_bytes(model.buffers())
        replay = Replay(
            self._unit_sizes(model, units, ignored, parts),
            parts,
            {i: size_bytes([p]) for i, p in enumerate(model.parameters()) if id(p) in left and p.requires_grad},
            reshards=self.reshard_after_forward,
            prefetch=self.prefetch,
            copies=subject.device.type == "cpu",
        )
        options = TraceOptions(tuple(units), self.activation_checkpointing, True, self.compute_format, tuple(ignored))
        trace = subject.trace(options)
        step = subject.step(lambda p: tuple(p.shape) if id(p) in left else part_of(p.shape, parts))
        peak = None
        if trace is not None and step is not None:
            peak = whole + self._peak(subject, replay, trace, step)
        found = Footprint(
            weights=whole + replay.parts,
            gradients=replay.gradients,
            optimizer=None if step is None else step.state,
            activations=None if trace is None else trace.highest,
            peak=peak,
        )
        return _on_host(found, replay) if self.cpu_offload else found

    def _peak(self, subject: Subject, replay: Replay, trace: TracedStep, step: OptimizerMemory) -> int:
        """The most of a step, without the weights that are whole in each process."""
        stepping = trace.left + replay.gradients
        passes, base = replay.highest(trace, subject.window_size), subject.batch_bytes
        if self.cpu_offload:
            return base + max(passes, stepping)
        return base + replay.parts + step.state + max(passes, stepping + step.temporary)

    def _unit_sizes(
        self, model: nn.Module, units: Sequence[nn.Module], ignored: Sequence[nn.Module], parts: int
    ) -> list[UnitSizes]:
        """Of each unit, the outermost last."""
        index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        owned = owned_parameters(model, {*units}, ignored)
        found = []
        for unit in [*units, model]:
            sizes = UnitSizes()
            own = {id(p): p for module, name in owned.get(unit, ()) if (p := getattr(module, name)) is not None}
            for key, parameter in own.items():
                self._add(sizes, parameter, index_of[key], parts)
            found.append(sizes)
        return found

    def _add(self, sizes: UnitSizes, parameter: Tensor, index: int, parts: int) -> None:
        count = math.prod(part_of(parameter.shape, parts))  # torch fills the last part up
        computes = self.compute_format if parameter.is_floating_point() else None
        kept = _FULL if computes and parameter.requires_grad else parameter.dtype
        computed = computes or kept
        reduced = self.reduce_format or computed
        sizes.part += count * kept.itemsize
        sizes.sent += count * computed.itemsize if computed != kept else 0
        sizes.sent += count * kept.itemsize if self.cpu_offload else 0
        sizes.whole += count * parts * computed.itemsize
        if parameter.requires_grad:
            sizes.trained[index] = parameter.numel() * computed.itemsize
            sizes.accumulated += parameter.numel() * reduced.itemsize
            sizes.reduced += count * parts * reduced.itemsize
            sizes.reduced_part += count * reduced.itemsize if self.cpu_offload or reduced != kept else 0
            if self.cpu_offload:
                sizes.away += count * kept.itemsize
            else:
                sizes.gradient_part += count * kept.itemsize


def _on_host(found: Footprint, replay: Replay) -> Footprint:
    """The same where parts, their gradients and the optimizer's state lie on the host."""
    return replace(
        found,
        weights=found.weights - replay.parts,
        optimizer=None if found.optimizer is None else 0,
        host=replay.parts + sum(unit.away for unit in replay.sizes) + (found.optimizer or 0),
    )
