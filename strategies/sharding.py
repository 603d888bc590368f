"""A model made into units whose weights are spread over the processes, with torch's `fully_shard`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError
from ..distributed.exchange import exchange
from .averaging import broadcast_tensors
from .passes import Owned
from .wrapping import is_called


def find_ignored(model: nn.Module, wanted: Iterable[str | nn.Module]) -> list[nn.Module]:
    """The modules of a model that are left whole: given themselves, or by patterns that match their whole names.

    Raises:
        ConfigError: a pattern matches no module, or a module is not the model's.
    """
    named = dict(model.named_modules())
    found: list[nn.Module] = []
    for each in wanted:
        if isinstance(each, nn.Module):
            own = [module for module in named.values() if module is each]
        else:
            own = [module for name, module in named.items() if name and re.fullmatch(each, name)]
        if not own:
            what = type(each).__name__ if isinstance(each, nn.Module) else repr(each)
            children = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"ignored_modules: {type(model).__name__} has no module {what}. Expected modules of it, or patterns of "
                f"their names; it holds {children or 'none'}."
            )
        found += own
    return found


def owned_parameters(root: nn.Module, units: Collection[nn.Module], ignored: Collection[nn.Module]) -> Owned:
    """For each unit, and the outermost, the parameters that are gathered with it: their modules and names. Local.

    Those that can't be cut are nobody's.
    """
    owned: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    left = {id(p) for module in ignored for p in module.parameters()}

    def walk(module: nn.Module, unit: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        unit = module if module in units else unit
        own = owned.setdefault(unit, [])
        held = module.named_parameters(recurse=False)
        own += [(module, name) for name, p in held if id(p) not in left and not is_uncut(p)]
        for child in module.children():
            walk(child, unit, seen)

    walk(root, root, set())
    return owned


def is_uncut(parameter: nn.Parameter) -> bool:
    """Whether a parameter can't be cut: it has no dimension, or no element, of which torch can't reduce a gradient."""
    return parameter.dim() == 0 or parameter.numel() == 0


def check_shardable(model: nn.Module, is_main: bool) -> None:
    """Refuse weights that nobody has values of, or that the units could not reduce together. Collective.

    Raises:
        ConfigError: on every process: names a parameter or buffer of the main process without memory.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = next((name for name, tensor in tensors if is_main and tensor.is_meta), None)
    first = exchange(on_meta, f"setup of {type(model).__name__}")[0]
    if first is not None:
        raise ConfigError(
            f"{first!r} of {type(model).__name__} has no values on the main process (device meta), from which the "
            "others get theirs. Build the model there without torch.device('meta'), and load its weights."
        )


def whole_parameters(model: nn.Module, ignored: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The parameters that stay whole, those of ignored modules and those that can't be cut: their modules and names.
    Local.
    """
    inside = {inner for module in ignored for inner in module.modules()}
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if module in inside or is_uncut(parameter)
    ]


def bring_values(holders: Iterable[tuple[nn.Module, str]], device: torch.device) -> None:
    """Give parameters a place on the device, and the values of process 0. Collective.

    Args:
        holders: modules and the names of their parameters; those without memory get some.
        device: where they are to be.
    """
    known: dict[int, nn.Parameter] = {}
    moved: list[Tensor] = []
    for module, name in holders:
        parameter = getattr(module, name)
        if is_sharded(parameter):
            continue  # cut by the user, who has brought its values
        if parameter.is_meta:
            if id(parameter) not in known:
                empty = torch.empty_like(parameter, device=device)
                known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter = known[id(parameter)]
            setattr(module, name, parameter)
        elif parameter.device != device:
            parameter.data = parameter.data.to(device)
        moved.append(parameter)
    broadcast_tensors(moved, "sharing the weights")


def bring_buffers(model: nn.Module, device: torch.device) -> None:
    """Give all buffers, those too that no state dict has, a place on the device and process 0's values. Collective."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module._buffers[name] = made[id(buffer)]
    broadcast_tensors(made.values(), "sharing the buffers")


def shard(
    units: Sequence[nn.Module],
    owned: Owned,
    device: torch.device,
    arguments: tuple[Mapping[str, Any], Mapping[str, Any]],
    cut: Callable[[Sequence[tuple[nn.Module, str]]], None] | None = None,
) -> None:
    """Make units of modules, one after another, so that never more than one is whole on the device. Collective.

    Args:
        units: each after those inside of it; the last is the outermost.
        owned: their parameters.
        device: where the process computes.
        arguments: of `fully_shard`, for the units inside, and for the outermost.
        cut: called with each unit's parameters before they are spread, where layers are cut as well.
    """
    from torch.distributed.fsdp import fully_shard

    inner, outermost = arguments
    for unit in units:
        assert is_called(unit)
        bring_values(owned.get(unit, ()), device)
        if cut is not None:
            cut(owned.get(unit, ()))
        fully_shard(unit, **(outermost if unit is units[-1] else inner))


def as_full_precision(owned: Owned) -> None:
    """Keep all trained weights in fp32, where units compute in another format: updates would be lost in it. Local."""
    for holders in owned.values():
        for module, name in holders:
            parameter = getattr(module, name)
            if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()


def check_formats(owned: Owned) -> None:
    """Refuse units whose trained parameters have several number formats, which are reduced as one. Local.

    Raises:
        ConfigError: names the unit and the formats.
    """
    for unit, holders in owned.items():
        parameters = [getattr(module, name) for module, name in holders]
        formats = {str(parameter.dtype) for parameter in parameters if parameter.requires_grad}
        if len(formats) > 1:
            raise ConfigError(
                f"the trained parameters of the unit {type(unit).__name__} have several number formats: "
                f"{', '.join(sorted(formats))}. Convert the model to one, or wrap the parts on their own."
            )
