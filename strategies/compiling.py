"""What of a model is compiled by `torch.compile`, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..distributed.errors import ConfigError, check_boolean, suggest
from .forward import ReplacedForward
from .wrapping import repeated_blocks

REGIONAL = "regional"
_OPTIONS = ("backend", "mode", "dynamic", "fullgraph", "options")
"""What `torch.compile` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """How a model is compiled."""

    regional: bool = False
    """Only the layers that the model repeats, one after another: the first one's code then serves all of them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `torch.compile`."""


class CompiledForward(ReplacedForward):
    """A module's own forward, compiled at its first call; a copy of the module compiles its own.

    The module's hooks stay outside: what shards a module gathers its weights in them.

    Args:
        module: whose forward this is.
        options: of `torch.compile`.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.options = dict(options)
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(self.__wrapped__, **self.options)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": None}


def read_compiling(given: object) -> Compiling | None:
    """What `compile=` means, None for nothing.

    Args:
        given: a boolean, `"regional"`, or a mapping with `"regional"` and arguments of `torch.compile`.
    Raises:
        ConfigError: it is something else.
    """
    if isinstance(given, bool):
        return Compiling() if given else None
    if given == REGIONAL:
        return Compiling(regional=True)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"compile={given!r}. Expected True, False, {REGIONAL!r}, or a mapping with {REGIONAL!r} and arguments of "
            f"torch.compile: {', '.join(_OPTIONS)}."
        )
    known = (REGIONAL, *_OPTIONS)
    for name in given:
        if name not in known:
            raise ConfigError(f"compile has an unknown key {name!r}. {suggest(str(name), known)}")
    regional = given.get(REGIONAL, False)
    check_boolean(f"compile[{REGIONAL}]", regional)
    return Compiling(regional=regional, options={name: value for name, value in given.items() if name != REGIONAL})


def compile_parts(model: nn.Module, compiling: Compiling) -> None:
    """Compile a model's children, or the layers that it repeats, in place: names stay, and what was compiled before is
    left as it is. Local.

    Raises:
        ConfigError: it repeats no layer.
    """
    if not compiling.regional:
        for child in model.children():
            if child._compiled_call_impl is None:
                child.compile(**compiling.options)
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile={REGIONAL!r}: {type(model).__name__} has no list of several layers of one class, and none of its "
            "modules names classes in _no_split_modules. Use compile=True, which compiles its children whole."
        )
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CompiledForward):
            block.forward = CompiledForward(block, compiling.options)
