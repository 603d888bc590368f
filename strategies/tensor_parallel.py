"""Layers of which each process of an axis has a part: a plan of styles, and torch's `parallelize_module` after it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError, DataError, suggest
from .tensor_styles import STYLES, split_dimension, style_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PlanLike: TypeAlias = "Mapping[str, Any] | None"
Holder: TypeAlias = "tuple[nn.Module, str]"
Plan: TypeAlias = "dict[nn.Module, Any]"
"""Modules with torch's styles of them."""

_SHOWN_NAMES = 20


def read_plan(option: str, plan: PlanLike) -> dict[str, Any] | None:
    """A plan as it was given, its words known. Local.

    Raises:
        ConfigError: it is no mapping of patterns to styles, or a word is unknown.
    """
    if plan is None:
        return None
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(name, str) for name in plan):
        raise ConfigError(
            f"{option}={plan!r:.200}. Expected a mapping of modules' names to styles, such as "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or None for the model's own plan."
        )
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(f"{option}[{pattern!r}]={style!r} is unknown. {suggest(style, STYLES)}")
        if not isinstance(style, str) and not hasattr(style, "_apply"):
            raise ConfigError(f"{option}[{pattern!r}]={style!r:.80}. Expected a word or one of torch's ParallelStyle.")
    return dict(plan)


def find_plan(model: nn.Module, given: Mapping[str, Any] | None) -> Plan:
    """The modules of a model that are cut, with their styles. Local.

    Args:
        model: whose modules.
        given: patterns of whole names, in which `*` stands for one part of a name; None: the model's own plan.
    Raises:
        ConfigError: a pattern matches no module, a style does not fit one, or the model has no plan.
    """
    named = {name: module for name, module in model.named_modules() if name}
    plan: Plan = {}
    for pattern, style in (own_plan(model) if given is None else given).items():
        matching = [name for name in named if _matches(name, pattern)]
        if not matching and given is not None:
            near = suggest(pattern, _general(named), is_listed=False)
            raise ConfigError(
                f"tensor_plan: {type(model).__name__} has no module {pattern!r}. {near} It holds {_shown(named)}."
            )
        for name in matching:
            if (made := style_of(name, named[name], style)) is not None:
                plan[named[name]] = made
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no plan of its own (tp_plan), and none was given, so that no layer would be "
            "cut. Give one of its modules, such as tensor_plan={'model.layers.*.up': 'colwise', "
            f"'model.layers.*.down': 'rowwise'}}; it holds {_shown(named)}."
        )
    return plan


def own_plan(model: nn.Module) -> dict[str, Any]:
    """The plan that a model has, as those of Hugging Face have it, by whole names. Local.

    Raises:
        ConfigError: a word in it is unknown.
    """
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for path, plan in _plans_of(module):
            start = ".".join(filter(None, (prefix, path)))
            found.update({f"{start}.{pattern}" if start else pattern: style for pattern, style in plan.items()})
    return read_plan(f"tp_plan of {type(model).__name__}", found) or {} if found else {}


def check_units(plan: Plan, units: Collection[nn.Module], ignored: Iterable[nn.Module]) -> None:
    """Refuse to cut what is gathered as a unit by itself, or what is left whole. Local.

    Raises:
        ConfigError: names the class.
    """
    for module in units:
        if module in plan:
            raise ConfigError(
                f"a {type(module).__name__} is in the tensor plan, and a unit of its own by wrap. Choose units that "
                "hold whole layers, such as the blocks of the model."
            )
    left = {inner for module in ignored for inner in module.modules()}
    if both := [type(module).__name__ for module in plan if module in left]:
        raise ConfigError(f"ignored_modules leaves a {both[0]} whole, and the tensor plan cuts it. Give one of them.")


def check_divides(plan: Plan, size: int) -> None:
    """Refuse layers whose inputs would be cut into parts of different sizes, or of which a process would have nothing.
    Local.

    Raises:
        ConfigError: says the layer's sizes.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for module, style in plan.items():
        if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear) and module.in_features % size:
            raise ConfigError(
                f"tensor_plan: {module} has {module.in_features} inputs, which can't be cut into {size} equal parts. "
                "Use another size of the tensor axis, or leave the layer whole."
            )
        if isinstance(style, (ColwiseParallel, RowwiseParallel)) and (found := _cut_size(module, style)) is not None:
            num_parts = -(-found // -(-found // size)) if found else 0
            if num_parts < size:
                raise ConfigError(
                    f"tensor_plan: {module} is cut along a dimension of {found}, which gives {num_parts} parts for "
                    f"{size} processes. Use another size of the tensor axis, or leave the layer whole."
                )


def _cut_size(module: nn.Module, style: Any) -> int | None:
    """How long the dimension is along which a layer is cut; None for a layer of another kind. Local."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    is_colwise = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Linear):
        return module.out_features if is_colwise else module.in_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim if is_colwise else module.num_embeddings
    return None


def cut(holders: Sequence[Holder], plan: Plan, mesh: DeviceMesh) -> None:
    """Keep of planned modules the part of this process. Local: all have the same values.

    Args:
        holders: modules and the names of their parameters, on the device; each of a shared parameter's is among them.
        plan: what to cut; other modules stay as they are.
        mesh: of the tensor axis alone.
    Raises:
        ConfigError: modules that share a parameter cut it in different ways.
    """
    before = [getattr(module, name) for module, name in holders]
    for module in dict.fromkeys(module for module, _ in holders):
        if module in plan:
            _apply(module, mesh, plan[module])
    first: dict[int, tuple[nn.Module, nn.Parameter]] = {}
    for (module, name), old in zip(holders, before, strict=True):
        other, kept = first.setdefault(id(old), (module, getattr(module, name)))
        new: nn.Parameter = getattr(module, name)
        if _placements(new) != _placements(kept):
            raise ConfigError(
                f"{type(other).__name__} and {type(module).__name__} share {name}, and the tensor plan cuts it in "
                "different ways. Plan both: 'embedding_rowwise' for the embedding, 'colwise_gather' for the output."
            )
        if new is not kept:
            module.register_parameter(name, kept)


def cut_inputs(plan: Plan, done: Collection[nn.Module], mesh: DeviceMesh) -> None:
    """Apply the styles of modules without parameters of their own, which cut what goes in or comes out. Local."""
    for module, style in plan.items():
        if module not in done:
            _apply(module, mesh, style)


def _apply(module: nn.Module, mesh: DeviceMesh, style: Any) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    if (dim := split_dimension(style)) is not None:
        module.register_forward_hook(partial(_check_length, dim, mesh.size()))
    for each in style if isinstance(style, tuple) else (style,):
        parallelize_module(module, mesh, each, src_data_rank=None)


def _check_length(dim: int, size: int, module: nn.Module, args: Any, outputs: Any) -> None:
    """A hook that refuses sequences which can't be cut into equal parts: torch would come to different sizes.

    Raises:
        DataError: says the length.
    """
    if isinstance(outputs, Tensor) and outputs.shape[dim] % size:
        raise DataError(
            f"sequences of {outputs.shape[dim]} can't be cut into {size} equal parts after {type(module).__name__}, as "
            "the tensor plan has it. Pad them to a multiple, or leave the sequence styles out of the plan."
        )


def _plans_of(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """A module's plans, each with the name of what it is for."""
    plans = []
    config_plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if isinstance(config_plan, Mapping):
        prefix = getattr(module, "base_model_prefix", "")
        plans.append((prefix if hasattr(module, prefix) else "", config_plan))
    own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if isinstance(own, Mapping):
        plans.append(("", own))
    return plans


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _general(named: Iterable[str]) -> list[str]:
    """Names of modules, each once that differ in numbers alone."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in named))


def _shown(named: Iterable[str]) -> str:
    """The first names of modules, for an error."""
    names = _general(named)
    return ", ".join(names if len(names) <= _SHOWN_NAMES else [*names[:_SHOWN_NAMES], "..."])


def _placements(parameter: Any) -> Any:
    return parameter.placements if is_sharded(parameter) else None
