"""What of a model is compiled by `torch.compile`, and how."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..checkpoint.names import unwrapped
from ..distributed.errors import ConfigError, check_boolean, suggest
from .dynamo_plugin import TorchDynamoPlugin
from .forward import ReplacedForward, is_compiled_module
from .wrapping import class_of, is_called, repeated_blocks

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
            self._compiled = torch.compile(self.function, **self.options)
        return self._compiled(*args, **kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        """What is compiled."""
        forward = self.__wrapped__
        function = getattr(forward, "__func__", None)
        if isinstance(function, FunctionType) and function.__module__.startswith("torch."):
            kind: Any = class_of(self.module)  # mypy takes a class for one of its objects
            return MethodType(_own_code(function, kind), self.module)
        return forward

    @property
    def code(self) -> CodeType:
        """The code of that, by which torch keeps what it has compiled."""
        function: Any = self.function
        code: CodeType = getattr(function, "__code__", None) or type(function).__call__.__code__
        return code

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": None}


@functools.cache
def _own_code(function: FunctionType, kind: type[nn.Module]) -> FunctionType:
    """A forward of torch's own modules as it would be outside of torch: what stands in torch's files is not compiled by
    itself, or under one name for all.
    """
    code = function.__code__.replace(co_filename=__file__, co_qualname=f"{kind.__qualname__}.forward")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def read_compiling(given: object) -> Compiling | None:
    """What `compile=` means, None for nothing.

    Args:
        given: a boolean, `"regional"`, a mapping with `"regional"` and arguments of `torch.compile`, or Accelerate's
            plugin.
    Raises:
        ConfigError: it is something else, or torch knows no such backend, mode or option.
    """
    if isinstance(given, bool):
        return Compiling() if given else None
    if isinstance(given, TorchDynamoPlugin):
        regional = bool(given.use_regional_compilation)
        return Compiling(regional=regional, options=given.to_kwargs()) if given.compiles else None
    if given == REGIONAL:
        return Compiling(regional=True)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"compile={given!r}. Expected True, False, {REGIONAL!r}, or a mapping with {REGIONAL!r} and arguments of "
            f"torch.compile: {', '.join(_OPTIONS)}; or TorchDynamoPlugin(...)."
        )
    known = (REGIONAL, *_OPTIONS)
    for name in given:
        if name not in known:
            raise ConfigError(f"compile has an unknown key {name!r}. {suggest(str(name), known)}")
    regional = given.get(REGIONAL, False)
    check_boolean(f"compile[{REGIONAL}]", regional)
    options = {name: value for name, value in given.items() if name != REGIONAL}
    _check_values(options)
    return Compiling(regional=regional, options=options)


def _check_values(options: Mapping[str, Any]) -> None:
    """Refuse what torch would refuse at the first forward, when data and model are there already."""
    backend, mode, extra = options.get("backend", "inductor"), options.get("mode"), options.get("options")
    if isinstance(backend, str):
        _check_word("compile[backend]", backend, torch._dynamo.list_backends(exclude_tags=None))
    elif not callable(backend):
        raise ConfigError(f"compile[backend]={backend!r:.80}. Expected the name of a backend, or a function.")
    for name, accepted in (("dynamic", (True, False, None)), ("fullgraph", (True, False))):
        if not any(options.get(name, False) is each for each in accepted):
            raise ConfigError(f"compile[{name}]={options[name]!r:.80}. Expected {' or '.join(map(str, accepted))}.")
    if not isinstance(extra, Mapping | None):
        raise ConfigError(f"compile[options]={extra!r:.80}. Expected a mapping.")
    if mode is not None and extra is not None:
        raise ConfigError(f"compile has mode={mode!r} and options: a mode is a choice of options. Give one of them.")
    if backend == "inductor":
        inductor = importlib.import_module("torch._inductor")
        if mode is not None:
            _check_word("compile[mode]", mode, inductor.list_mode_options())
        for name in extra or ():
            # Inductor takes either spelling, and every name in its configuration.
            _check_word("compile[options]", str(name).replace("-", "_"), inductor.list_options())


def _check_word(option: str, word: object, known: Iterable[str]) -> None:
    accepted = tuple(known)
    if word not in accepted:
        raise ConfigError(f"{option}={word!r} is unknown to torch. {suggest(str(word), accepted)}")


def compile_parts(model: nn.Module, compiling: Compiling) -> None:
    """Compile a model's children, or the layers that it repeats, in place: names stay, and what was compiled before is
    left as it is. Local.

    Raises:
        ConfigError: it repeats no layer.
    """
    parts = repeated_blocks(model) if compiling.regional else _called_children(model)
    if compiling.regional and not parts:
        raise ConfigError(
            f"compile={REGIONAL!r}: {type(model).__name__} has no list of several layers of one class, and none of its "
            "modules names classes in _no_split_modules. Use compile=True, which compiles its children whole."
        )
    _compile_each(parts, compiling)


def compile_model(model: nn.Module, compiling: Compiling) -> None:
    """Compile a model, or the layers that it repeats if there are any, in place, inside of what wraps it. Local."""
    if not is_compiled_module(model):
        inner = unwrapped(model)
        blocks = repeated_blocks(inner) if compiling.regional else []
        _compile_each(blocks or [inner], compiling)


def is_compiled_around(model: nn.Module, units: Container[nn.Module]) -> bool:
    """Whether hooks of some units of a model are inside of what is compiled: of one that holds them. Local."""
    return any(
        module._compiled_call_impl is not None
        or (_compiled_forward(module) is not None and any(p in units for p in module.modules() if p is not module))
        for module in model.modules()
    )


def compiled_codes(model: nn.Module) -> dict[CodeType, str]:
    """What was compiled of a model: the code of the function that was, and the names of the modules that run it."""
    modules: dict[CodeType, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if (forward := _compiled_forward(module)) is not None:
            modules.setdefault(forward.code, []).append((name, module))
    return {code: _names(found) for code, found in modules.items()}


def _compile_each(modules: Iterable[nn.Module], compiling: Compiling) -> None:
    for module in modules:
        is_compiled = is_compiled_module(module) or module._compiled_call_impl is not None  # by who wrote it
        if not is_compiled and _compiled_forward(module) is None:
            module.forward = CompiledForward(module, compiling.options)


def _compiled_forward(module: nn.Module) -> CompiledForward | None:
    """The compiled forward of a module, also inside of another that was put around it; None where there is none."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ReplacedForward) and not isinstance(forward, CompiledForward):
        forward = forward.replaced
    return forward if isinstance(forward, CompiledForward) else None


def _called_children(model: nn.Module) -> list[nn.Module]:
    """The children that have a forward pass of their own; of those that have none, lists for one, their children."""
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if is_called(child) else _called_children(child)
    return found


def _names(modules: Sequence[tuple[str, nn.Module]]) -> str:
    name, first = modules[0]
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    kind = class_of(first).__name__
    return f"{name}{more} ({kind})" if name else kind
