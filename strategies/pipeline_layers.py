"""A model as layers that are called one after another, and how these are cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from ..distributed.errors import ConfigError, suggest

Loss: TypeAlias = Tensor | tuple[Tensor, Any]
"""The mean loss of samples, a scalar; or `(loss_sum, count)`, which weighs by what is counted."""


@runtime_checkable
class Pipelined(Protocol):
    """What a model says of itself so that it can be cut; a `Task` does."""

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The layers in the order in which they are called, each with the one tensor that the one before it gave."""

    def pipeline_input(self, batch: Any) -> Tensor:
        """What the first layer takes of a batch; dimension 0 counts samples."""

    def pipeline_loss(self, output: Tensor, batch: Any) -> Loss:
        """The loss of a batch, from what the last layer gave."""


def whole_loss(model: Pipelined, batch: Any) -> Loss:
    """The loss of a batch where one process has all layers. Local."""
    output = model.pipeline_input(batch)
    for layer in model.pipeline_layers():
        output = layer(output)
    return model.pipeline_loss(output, batch)


@dataclass(frozen=True, slots=True)
class Cut:
    """A model whose layers are dealt to stages, and the stages to the processes of a pipeline: stage 0 to the first."""

    model: nn.Module
    stages: tuple[tuple[nn.Module, ...], ...]
    """The layers of each stage."""
    owners: tuple[int, ...]
    """The process that has each stage."""
    parameters: Mapping[int, int]
    """The process that has a parameter, by its `id`; others are whole in all."""
    modules: Mapping[int, int]
    """The process that has a layer, or a module inside of one, by its `id`."""

    def entries_of(self, process: int) -> dict[int, tuple[nn.Module, ...]]:
        """The layers of each stage of a process, by the stage's number."""
        return {index: self.stages[index] for index, owner in enumerate(self.owners) if owner == process}

    def owner_of(self, entry: str) -> int | None:
        """The process that has an entry of the model's state dict; None: all have it."""
        return self.modules.get(id(self.model.get_submodule(entry.rpartition(".")[0])))

    def holder_of(self, tensor: Tensor) -> int | None:
        """The process that has the values of a parameter or buffer; None: all have them."""
        holder = self.parameters.get(id(tensor))
        if holder is not None or isinstance(tensor, nn.Parameter):
            return holder
        layers = ((owner, layer) for owner, stage in zip(self.owners, self.stages, strict=True) for layer in stage)
        return next((owner for owner, layer in layers if any(tensor is each for each in layer.buffers())), None)

    def trained_by(self, process: int) -> list[nn.Parameter]:
        """The trainable parameters in the stages of a process, each once."""
        stages = self.entries_of(process).values()
        found = {id(p): p for stage in stages for layer in stage for p in layer.parameters() if p.requires_grad}
        return list(found.values())

    def elsewhere(self, process: int) -> list[nn.Parameter]:
        """The parameters that a process hasn't."""
        return [p for p in self.model.parameters() if self.parameters.get(id(p), process) != process]


def cut(
    model: nn.Module, num_processes: int, num_stages: int, split: Sequence[str], *, turns_back: bool = False
) -> Cut:
    """Cut a model's layers into stages. Local.

    Args:
        model: it has `pipeline_layers`.
        num_processes: among which the stages are dealt.
        num_stages: a multiple of it.
        split: names of the layers with which the second and each further stage begins; empty: stages are chosen so that
            the largest has as few parameters as can be.
        turns_back: deal every other round of stages from the last process to the first.
    Raises:
        ConfigError: the layers can't be cut so.
    """
    name = type(model).__name__
    if not isinstance(model, Pipelined):
        raise ConfigError(f"{name} has no pipeline_layers, which strategy='pipeline' cuts. Give it a Task that has.")
    layers = list(model.pipeline_layers())
    if len(layers) < num_stages:
        raise ConfigError(
            f"{name}.pipeline_layers() gives {len(layers)} layers, and there are {num_stages} stages of at least one. "
            "Use fewer processes or stages_per_process, or give smaller layers."
        )
    begins = _named_begins(model, layers, num_stages, split) if split else _even_begins(layers, num_stages)
    ends = [*begins[1:], len(layers)]
    stages = tuple(tuple(layers[begin:end]) for begin, end in zip(begins, ends, strict=True))
    owners = [_owner(index, num_processes, turns_back) for index in range(num_stages)]
    _check_layers(model, stages, owners)
    return _cut_at(model, stages, owners)


def renewed(cut: Cut) -> Cut:
    """The same cut, with the parameters that the layers have now. Local."""
    return _cut_at(cut.model, cut.stages, cut.owners)


def _cut_at(model: nn.Module, stages: Sequence[tuple[nn.Module, ...]], owners: Sequence[int]) -> Cut:
    each = [(owner, layer) for owner, stage in zip(owners, stages, strict=True) for layer in stage]
    modules = {id(module): owner for owner, layer in each for module in layer.modules()}
    parameters = {id(parameter): owner for owner, layer in each for parameter in layer.parameters()}
    return Cut(model, tuple(stages), tuple(owners), parameters, modules)


def _owner(stage: int, num_processes: int, turns_back: bool) -> int:
    """The process that a stage is dealt to."""
    number, place = divmod(stage, num_processes)
    return num_processes - 1 - place if turns_back and number % 2 else place


def free(parameter: nn.Parameter, device: torch.device) -> None:
    """Let a parameter of another process keep its shape, in the memory of one number. Local."""
    parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def is_freed(parameter: Tensor) -> bool:
    """Whether `free` has taken a parameter's numbers. Local."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _even_begins(layers: Sequence[nn.Module], num_stages: int) -> list[int]:
    """Where stages begin so that the largest is as small as can be."""
    sums = [0]
    for layer in layers:
        sums.append(sums[-1] + sum(parameter.numel() for parameter in layer.parameters()))

    @cache
    def best(end: int, count: int) -> tuple[int, tuple[int, ...]]:
        """The largest of so many stages up to an end, and their begins."""
        if count == 1:
            return sums[end], (0,)
        found = []
        for begin in range(count - 1, end):
            largest, begins = best(begin, count - 1)
            found.append((max(largest, sums[end] - sums[begin]), (*begins, begin)))
        return min(found, key=lambda each: each[0])

    return list(best(len(layers), num_stages)[1])


def _named_begins(model: nn.Module, layers: Sequence[nn.Module], num_stages: int, split: Sequence[str]) -> list[int]:
    if len(split) != num_stages - 1:
        raise ConfigError(
            f"split={list(split)} makes {len(split) + 1} stages, and there are {num_stages}: stages_per_process for "
            f"each process. Name {num_stages - 1} layers; the first stage begins with the first layer anyway."
        )
    places = {id(layer): index for index, layer in enumerate(layers)}
    known = {name: places[id(module)] for name, module in model.named_modules() if id(module) in places}
    for name in split:
        if name not in known:
            raise ConfigError(f"split: {name!r} is none of {type(model).__name__}'s layers. {suggest(name, known)}")
    begins = [0, *(known[name] for name in split)]
    if begins != sorted(set(begins)):
        raise ConfigError(
            f"split={list(split)} is not in the order of the layers, or names the first. Name each layer with which a "
            f"further stage begins, in order; the layers are {sorted(known, key=lambda each: known[each])}."
        )
    return begins


def _check_layers(model: nn.Module, stages: Sequence[Sequence[nn.Module]], owners: Sequence[int]) -> None:
    """Refuse layers that one process can't compute alone. Local."""
    kind, names = type(model).__name__, {id(p): name for name, p in model.named_parameters()}
    places: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for parameter in (parameter for layer in stage for parameter in layer.parameters()):
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"{kind}.pipeline_layers() gives a layer with parameters that is no part of it. Make it an "
                    "attribute in __init__ or configure_model."
                )
            if owners[places.setdefault(id(parameter), index)] != owners[index]:
                raise ConfigError(
                    f"parameter {name} of {kind} is in the stages {places[id(parameter)]} and {index} of the pipeline, "
                    "in two processes, of which one trains it. Untie it, or let split= keep its layers in one stage. "
                    "schedule='zbv_zero_bubble' has the first stage and the last in one process."
                )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in places:
            raise ConfigError(
                f"parameter {name} of {kind} is in none of its pipeline_layers(), so that no stage trains it. Put it "
                "into the layer that uses it, or freeze it."
            )
    if not any(parameter.requires_grad for layer in stages[0] for parameter in layer.parameters()):
        raise ConfigError(
            f"the first stage of {kind} has no trainable parameter, and torch's pipelines go backward through it. Let "
            "split= begin the second stage later."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"layer {name} of {kind} is a {type(module).__name__}, whose statistics would be those of a part of the"
                " batch. Use LayerNorm or GroupNorm, or another strategy."
            )
