"""What a class or a function can be given by a file: the names, types and defaults of its parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union

from jsonargparse import ArgumentParser


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter that a file may give."""

    hint: Any
    """Its type; `Any` where it has none."""
    is_required: bool = False
    """Whether it has no default."""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The members of its type: a union's members, the types of a literal's values."""
        return kinds_of(self.hint)

    @property
    def takes_none(self) -> bool:
        """Whether its type says that None is a value of its own."""
        return type(None) in self.kinds


@functools.cache
def parameters_of(target: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters by name; those that `**kwargs` hands to a base class are among them."""
    known = _declared_parameters(target)
    return {name: known.get(name, Parameter(Any)) for name in _accepted_names(target)}


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a type: unions are opened, also in each other; a literal counts as the types of its values."""
    return tuple(dict.fromkeys(_members(hint)))


def describe(hint: Any) -> str:
    """A type in the words of a message: "int, str or None"; of a literal, its values."""
    names = list(dict.fromkeys(_names(hint)))
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _names(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _names(member)
    elif typing.get_origin(hint) is Literal:
        yield from map(repr, typing.get_args(hint))
    elif inspect.isclass(hint) and typing.get_origin(hint) is None:
        yield "None" if hint is type(None) else hint.__name__
    else:
        yield re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(hint))


def _members(hint: Any) -> Iterator[Any]:
    origin = typing.get_origin(hint)
    if origin is Union or origin is types.UnionType:
        for member in typing.get_args(hint):
            yield from _members(member)
    elif origin is Annotated:
        yield from _members(typing.get_args(hint)[0])
    elif origin is Literal:
        yield from (type(value) for value in typing.get_args(hint))
    elif isinstance(hint, typing.NewType):
        yield from _members(hint.__supertype__)
    elif isinstance(hint, TypeVar) or hint is object or hint is inspect.Parameter.empty:
        yield Any
    else:
        yield type(None) if hint is None else hint


def _accepted_names(target: Callable[..., Any]) -> list[str]:
    """The names as jsonargparse sees them, which follows `**kwargs` through the source code."""
    parser = ArgumentParser()
    if inspect.isclass(target):
        names = parser.add_class_arguments(target, "_", fail_untyped=False, as_group=False)
    else:
        names = parser.add_function_arguments(target, "_", fail_untyped=False, as_group=False)
    return [name.removeprefix("_.") for name in names]


def _declared_parameters(target: Callable[..., Any]) -> dict[str, Parameter]:
    """Parameters with their types, the nearest class of the inheritance first."""
    owners = [target]
    if inspect.isclass(target):
        constructors = [vars(cls).get("__init__") for cls in target.__mro__]
        owners = [constructor for constructor in constructors if inspect.isfunction(constructor)]
    found: dict[str, Parameter] = {}
    for function in owners:
        hints = _hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            found.setdefault(name, _parameter(hints.get(name, inspect.Parameter.empty), parameter.default))
    return found


def _parameter(hint: Any, default: Any) -> Parameter:
    if default is dataclasses.MISSING or default is inspect.Parameter.empty:
        return Parameter(hint, is_required=True)
    if hint is inspect.Parameter.empty and isinstance(default, bool):
        return Parameter(bool)
    if hint is inspect.Parameter.empty and default is not None:
        return Parameter(Union[type(default), Any])  # noqa: UP007 - without a type, the default shows what is meant
    return Parameter(hint)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as types; one that needs a name imported for type checkers alone counts as `Any`."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    return {name: _evaluated(hint, scope) for name, hint in inspect.get_annotations(function).items()}


def _evaluated(hint: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"_": hint}), scope)["_"]
    except (NameError, TypeError, AttributeError):
        return Any
