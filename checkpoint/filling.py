"""Filling a module's weights from files without holding them in memory twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .sharded import is_sharded
from .sources import WeightSource
from .stored import fill


def fill_in_place(
    module: nn.Module, own: Mapping[str, Any], sources: Mapping[str, str], saved: WeightSource, ties: set[str]
) -> dict[str, Any]:
    """What `module.load_state_dict` has to be given so that all sources end in the module. Local.

    Weights of modules that load in torch's own way are read right here, and stand for themselves in the result, so that
    torch has nothing to copy. The others are tensors that are read from the files.

    Args:
        module: as it is, wrapped or not.
        own: its state dict, with the parameters themselves.
        sources: for names of that state dict, and others, the name in the files.
        saved: the files.
        ties: names whose memory another name fills.
    """
    plain_modules = _modules_that_copy(module)
    values: dict[str, Any] = {}
    targets: dict[str, Tensor] = {}
    for name, source in sources.items():
        mine = own.get(name)
        is_plain = type(mine) in (Tensor, nn.Parameter) and name.rpartition(".")[0] in plain_modules
        shape = saved.shape_of(source)
        if is_sharded(mine) and mine is not None and shape == mine.shape:
            if name not in ties:
                fill(saved, {source: mine})
            values[name] = mine
            continue
        if not is_plain or mine is None or shape is None:
            values[name] = saved[source]
            continue
        if name in ties:
            pass  # its memory is filled under another name
        elif source in targets:
            saved.read_into({source: mine})
        else:
            targets[source] = mine
        values[name] = mine
    saved.read_into(targets)
    return values


def _modules_that_copy(module: nn.Module) -> set[str]:
    """The paths of the modules in which nothing but torch's own copying happens to a state dict, also from above."""
    found: set[str] = set()
    for path, part in module.named_modules(remove_duplicate=False):
        is_below = not path or path.rpartition(".")[0] in found
        if is_below and _copies(part):
            found.add(path)
    return found


def _copies(part: nn.Module) -> bool:
    is_own = type(part)._load_from_state_dict is nn.Module._load_from_state_dict
    return is_own and not part._load_state_dict_pre_hooks and type(part).load_state_dict is nn.Module.load_state_dict
