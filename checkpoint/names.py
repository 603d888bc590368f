"""Modules, and the names of their entries, without the wrappers of the compiler and of data parallelism."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

COMPILED = "_orig_mod"
"""The attribute in which the wrapper of `torch.compile` holds its module."""


class MethodForward(nn.Module):
    """A wrapper whose forward calls another method of its module, for what watches over forward passes alone.

    Args:
        module: whose method it is.
        method: its name.
    """

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method
        self.num_calls = 0
        """Forward passes so far."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["num_calls"] += 1  # past the bookkeeping of modules, which costs more
        return getattr(self._modules["module"], self.method)(*args, **kwargs)


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each name of a state dict without the parts that wrappers add, by the name as the module has it.

    `torch.compile` puts `_orig_mod.` into names and the data-parallel wrappers `module.`, at the top or inside. Only
    what a wrapper really adds is taken out: a parameter called `_orig_mod_x` and a child called `module` keep theirs.
    """
    inside = {
        f"{path}.{attribute}" if path else attribute
        for path, part in module.named_modules(remove_duplicate=False)
        if (attribute := wrapped_attribute(part))
    }
    return {name: _without(name, inside) for name in names}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers around it; those further inside stay. Nothing is changed."""
    while attribute := wrapped_attribute(module):
        module = getattr(module, attribute)
    return module


def wrapped_attribute(module: object) -> str | None:
    """The attribute in which a wrapper holds its module, None if this is no wrapper."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, MethodForward)):
        return "module"
    # Both are imported only where something was wrapped by them, and take seconds.
    engines = sys.modules.get("deepspeed.runtime.engine")
    if engines is not None and isinstance(module, engines.DeepSpeedEngine):
        return "module"
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return COMPILED if compiler is not None and isinstance(module, compiler.OptimizedModule) else None


def _without(name: str, inside: set[str]) -> str:
    parts = name.split(".")
    return ".".join(part for index, part in enumerate(parts) if ".".join(parts[: index + 1]) not in inside)
