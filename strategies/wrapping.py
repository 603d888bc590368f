"""Which modules of a model are sharded as units of their own: their weights are gathered and freed together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from torch import nn

from ..distributed.errors import ConfigError, suggest

WrapPolicy: TypeAlias = "str | int | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], bool]"

AUTO, NONE = "auto", "none"


def check_policy(option: str, policy: object) -> None:
    """Refuse what can't choose modules. Local.

    Raises:
        ConfigError: it is nothing that `find_units` understands.
    """
    is_size = isinstance(policy, int) and not isinstance(policy, bool) and policy > 0
    names = policy if isinstance(policy, (list, tuple)) else [policy]
    are_classes = all(isinstance(name, (str, type)) for name in names)
    if not (is_size or are_classes or callable(policy)):
        raise ConfigError(
            f"{option}={policy!r}. Expected 'auto', 'none', classes of modules or their names, a number of parameters "
            "from which on a module is a unit, or a function that is given a module."
        )


def find_units(model: nn.Module, policy: WrapPolicy, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The modules that become units, each after those inside of it; the model itself is none of them. Local.

    A module that shares a parameter, or a module that is no unit, with one outside of it is left to what holds both,
    so that they stay one.

    Args:
        model: whose modules.
        policy: `"auto"`: the classes that the model names in `_no_split_modules`, or else the layers of its longest
            list of modules of one class; `"none"`: no module; classes or their names; a number of parameters; or a
            function of a module.
        ignored: modules that are left alone, with all inside of them.
    Raises:
        ConfigError: the model has no module of a class, or one that is never called.
    """
    chosen = _chosen(model, policy)
    left = {inner for module in ignored for inner in module.modules()}
    places = _places(model)
    found: list[nn.Module] = []
    for module in _inside_out(model):
        if module in chosen and module is not model and module not in left and _is_closed(module, places):
            found.append(module)
            for parameter in module.parameters():
                places[id(parameter)] = []  # a unit of its own in what holds it
    return found


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of which a model is built: of the classes that it names in `_no_split_modules`, or else those of its
    longest list of modules of one class. Local.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = [module for module in model.modules() if class_of(module).__name__ in named]
    if found:
        return found
    lists = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    layers = [each for each in lists if len(each) > 1 and len({type(layer) for layer in each}) == 1]
    return [layer for layer in max(layers, key=len, default=[]) if is_called(layer)]


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward pass of its own, unlike a list of modules. Local."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class as it was written: `fully_shard` puts another in its place. Local."""
    sharding = sys.modules.get("torch.distributed.fsdp")  # nobody has sharded one where it was never imported
    own = type(module)
    return own.__mro__[2] if sharding is not None and issubclass(own, sharding.FSDPModule) else own


def _chosen(model: nn.Module, policy: WrapPolicy) -> set[nn.Module]:
    if policy == NONE:
        return set()
    if policy == AUTO:
        return {*repeated_blocks(model)}
    if isinstance(policy, int):
        return _of_size(model, policy)
    if isinstance(policy, (str, type)):
        return _of_classes(model, [policy])
    if isinstance(policy, Sequence):
        return _of_classes(model, policy)
    return {module for module in model.modules() if policy(module) and is_called(module)}


def _of_classes(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for each in wanted:
        own = [module for module in model.modules() if _is_of(module, each)]
        if not own:
            name = each if isinstance(each, str) else each.__name__
            known = {type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())}
            raise ConfigError(f"wrap: {type(model).__name__} has no module of class {name!r}. {suggest(name, known)}")
        if not is_called(own[0]):
            raise ConfigError(
                f"wrap: modules of class {type(own[0]).__name__!r} are never called themselves, so that nothing tells "
                "when their weights are needed. Give the class of the modules that it holds."
            )
        found.update(own)
    return found


def _is_of(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    return type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted)


def _of_size(model: nn.Module, least: int) -> set[nn.Module]:
    """The innermost modules that hold, without units inside of them, so many parameters."""
    found: set[nn.Module] = set()
    rest: dict[nn.Module, int] = {}
    for module in _inside_out(model):
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        size += sum(rest[child] for child in module.children())
        if size >= least and is_called(module):
            found.add(module)
            size = 0
        rest[module] = size
    return found


def _inside_out(model: nn.Module) -> list[nn.Module]:
    """All modules, each after those that it holds, the last ones first. Not the reversed order of `modules()`: one that
    several hold has to come before all of them.
    """
    found: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in reversed(list(module.children())):
            if child not in found:
                walk(child)
        found[module] = None

    walk(model)
    return list(found)


def _places(model: nn.Module) -> dict[int, list[set[nn.Module]]]:
    """Of each parameter, by its `id`, the places where it is: the modules that hold one another down to it."""
    places: dict[int, list[set[nn.Module]]] = {}

    def walk(module: nn.Module, around: set[nn.Module]) -> None:
        around = around | {module}
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(around)
        for child in module._modules.values():
            if child is not None:
                walk(child, around)

    walk(model, set())
    return places


def _is_closed(module: nn.Module, places: dict[int, list[set[nn.Module]]]) -> bool:
    """Whether a module has parameters, and all places of these are inside of it."""
    own = list(module.parameters())
    return bool(own) and all(module in place for parameter in own for place in places[id(parameter)])
