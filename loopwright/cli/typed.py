"""Gives every value of a tree the type of its field, and collects all that doesn't fit in one go."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from ..distributed.errors import ConfigError, suggest
from .classes import find_class, full_class_path, is_public_name
from .foreign import FOREIGN_KEYS
from .scalars import TextList, TextMapping, UnreadableError, Verbatim, is_null, read_scalar
from .signature import Parameter, kinds_of, parameters_of
from .sources import Tree

_SPEC_KEYS = ("class_path", "init_args")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One key that can't be used."""

    path: str
    """The dotted path of the key."""
    message: str
    is_missing: bool = False
    """Whether the key should be there and is not."""


class TypedReader:
    """Walks a tree along the signatures of the classes that it names."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        """Each unknown key, missing argument, class that isn't there and bad boolean."""
        self.class_paths: list[str] = []
        """The classes named, in full."""

    def read_arguments(
        self,
        given: Any,
        parameters: Mapping[str, Parameter],
        path: str,
        *,
        is_none_a_value: bool = True,
        is_complete: bool = True,
    ) -> Tree:
        """The arguments for a signature; a null is left out, so that the default holds, unless the type takes None.

        Args:
            given: the mapping of names to texts; null counts as an empty one.
            parameters: the signature.
            path: the dotted path of the mapping, for problems.
            is_none_a_value: whether null is passed on where the type takes None.
            is_complete: whether required arguments that are missing are a problem.
        """
        if is_null(given) or given is None:
            given = {}
        if not isinstance(given, dict):
            self.problems.append(Problem(path, f"got {given!r}. Expected a mapping of arguments by name."))
            return {}
        self._check_names(given, parameters, path, is_complete=is_complete)
        read: Tree = {}
        for name, value in given.items():
            parameter = parameters.get(name)
            if parameter is None or (is_null(value) and not (is_none_a_value and parameter.takes_none)):
                continue
            read[name] = self.read_value(value, parameter.kinds, f"{path}.{name}")
        return read

    def read_class(self, spec: Any, path: str, *, is_built: bool = True) -> Tree | None:
        """The full class path and the typed arguments of a class or function that is named; None after a problem.

        Args:
            spec: a mapping with `class_path` and, if any, `init_args`; or the class path alone.
            path: the dotted path of the key, for problems.
            is_built: whether it is called with these arguments alone, so that none may be missing.
        """
        spec = {"class_path": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, dict) or not isinstance(spec.get("class_path"), str) or is_null(spec["class_path"]):
            self.problems.append(Problem(path, "no class. Expected a mapping with class_path and, if any, init_args."))
            return None
        class_path = full_class_path(str(spec["class_path"]))
        try:
            target = find_class(class_path)
        except ConfigError as error:
            self._check_names(spec, _SPEC_KEYS, path)
            self.problems.append(Problem(f"{path}.class_path", str(error)))
            return None
        self.class_paths.append(class_path)
        parameters = parameters_of(target)
        self._check_names(spec, _SPEC_KEYS, path, {name: f"{path}.init_args.{name}" for name in parameters})
        arguments = self.read_arguments(spec.get("init_args"), parameters, f"{path}.init_args", is_complete=is_built)
        return {"class_path": class_path, "init_args": arguments}

    def read_value(self, value: Any, kinds: Sequence[Any], path: str) -> Any:
        """One value for a field whose type is any of `kinds`."""
        if is_null(value):
            return None
        if isinstance(value, TextMapping | TextList) and set(kinds) <= {str, type(None)}:
            return value.text
        if isinstance(value, dict):
            return self._read_mapping(value, kinds, path)
        if isinstance(value, list):
            items = list(_item_kinds(kinds, len(value)))
            return [self.read_value(item, items[i], f"{path}.{i}") for i, item in enumerate(value)]
        return self._read_text(value, kinds, path)

    def _read_text(self, text: str, kinds: Sequence[Any], path: str) -> Any:
        bases = _classes(kinds)
        if bases and (is_public_name(text) or not (str in kinds or Any in kinds)):
            return self.read_class(text, path)
        try:
            return read_scalar(text, kinds)
        except UnreadableError as error:
            self.problems.append(Problem(path, str(error)))
            return None

    def _read_mapping(self, value: Tree, kinds: Sequence[Any], path: str) -> Any:
        is_built = bool(_classes(kinds)) or Any in kinds
        if "class_path" in value and (is_built or any(_is_callable(kind) for kind in kinds)):
            return self.read_class(value, path, is_built=is_built)
        fields = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if fields is not None:
            return self.read_arguments(value, parameters_of(fields), path)  # type: ignore[arg-type]
        key_kinds, value_kinds = _entry_kinds(kinds)
        return {
            _plain_key(read_scalar(key, key_kinds)): self.read_value(item, value_kinds, f"{path}.{key}")
            for key, item in value.items()
        }

    def _check_names(
        self,
        given: Tree,
        known: Mapping[str, Parameter] | Sequence[str],
        path: str,
        elsewhere: Mapping[str, str] | None = None,
        *,
        is_complete: bool = False,
    ) -> None:
        """Note the names that are unknown, and those that are missing; `elsewhere` says what else may be meant."""
        others = FOREIGN_KEYS if path == "trainer" else elsewhere or {}
        places = {**others, **{name: f"{path}.{name}" for name in known}}
        for name in given:
            if name not in known:
                message = f"unknown key. {suggest(name, known, places=places)}"
                self.problems.append(Problem(f"{path}.{name}", message))
        if is_complete and isinstance(known, Mapping):
            for name, parameter in known.items():
                if parameter.is_required and name not in given:
                    self.problems.append(Problem(f"{path}.{name}", "required, and missing.", is_missing=True))


def _plain_key(key: Any) -> Any:
    return key.text if isinstance(key, Verbatim) else key


def _classes(kinds: Sequence[Any]) -> list[type]:
    """Those of the kinds whose values are built from a class path; of `Dataset[int]`, the class `Dataset`."""
    bases = [typing.get_origin(kind) or kind for kind in kinds]
    return [base for base in bases if inspect.isclass(base) and not _is_written_out(base)]


def _is_written_out(kind: type) -> bool:
    """Whether values of this class are written as a scalar, a list or a mapping, and not as a class path."""
    return (
        dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or issubclass(kind, str | int | float | Enum)
        or kind.__module__ in _PLAIN_MODULES
    )


_PLAIN_MODULES = ("builtins", "collections", "collections.abc", "datetime", "decimal", "os", "pathlib", "typing")
_SEQUENCES = {abc.Iterable, abc.Collection, abc.Sequence, abc.MutableSequence, list, tuple, set, frozenset}
_MAPPINGS = {abc.Mapping, abc.MutableMapping, dict}


def _is_callable(kind: Any) -> bool:
    return abc.Callable in (kind, typing.get_origin(kind))


def _item_kinds(kinds: Sequence[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """The kinds of each of `count` items of a list in a field of these kinds."""
    arguments: tuple[Any, ...] = ()
    for kind in kinds:
        if typing.get_origin(kind) in _SEQUENCES:
            arguments = typing.get_args(kind)
            break
    if len(arguments) == count and count > 1:
        yield from (kinds_of(argument) for argument in arguments)  # tuple[float, float]
    else:
        for _ in range(count):
            yield kinds_of(arguments[0]) if arguments else (Any,)


def _entry_kinds(kinds: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The kinds of the keys and of the values of a mapping in a field of these kinds."""
    for kind in kinds:
        if typing.get_origin(kind) in _MAPPINGS:
            key, value = typing.get_args(kind)
            return kinds_of(key), kinds_of(value)
    return (str,), (Any,)
