"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeAlias, TypeVar

from ..distributed.errors import ConfigError, suggest
from .single import SingleDeviceStrategy
from .strategy import Strategy

StrategyLike: TypeAlias = "str | Mapping[str, Any] | Strategy"
S = TypeVar("S", bound=type[Strategy])

ENTRY_POINT_GROUP = "loopwright.strategies"
_registered: dict[str, type[Strategy]] = {"single": SingleDeviceStrategy}


def register_strategy(name: str) -> Callable[[S], S]:
    """Decorate a `Strategy` class so that `strategy=name` chooses it. Packages use the entry point group instead.

    Raises:
        ConfigError: the name is taken.
    """

    def register(cls: S) -> S:
        if name in _registered:
            raise ConfigError(f"register_strategy({name!r}): the name belongs to {_registered[name].__name__} already.")
        _registered[name] = cls
        return cls

    return register


def create_strategy(spec: StrategyLike) -> Strategy:
    """The strategy that a word, a mapping `{"name": ..., **options}` or an object names.

    Raises:
        ConfigError: the name or an option is unknown.
    """
    if isinstance(spec, Strategy):
        return spec
    options: dict[str, Any] = {}
    name: object = spec
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if name is None:
            raise ConfigError(f"strategy={dict(spec)!r} has no 'name'. Expected such as {{'name': 'single', ...}}.")
    if not isinstance(name, str):
        raise ConfigError(f"strategy={spec!r}. Expected a word, a mapping with 'name', or a Strategy object.")
    cls = _find("single" if name == "auto" else name)
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigError(f"strategy={name!r} does not take these options {options!r}: {error}.") from error


def _find(name: str) -> type[Strategy]:
    if name in _registered:
        return _registered[name]
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in plugins:
        found: type[Strategy] = plugins[name].load()
        return found
    raise ConfigError(f"strategy={name!r} is unknown. {suggest(name, ['auto', *_registered, *plugins])}")
