"""YAML in which the field, and not the spelling, decides a value's type: one rule for files, variables and flags.

YAML 1.1 reads `1e-3` as text, `007` as a number and `no` as a boolean, whatever the field is. Here every scalar stays
the text that was written, and `read_scalar` gives it its type once the field is known.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import yaml

from ..distributed.environment import FALSE_WORDS, TRUE_WORDS, read_boolean
from ..distributed.errors import ConfigError

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = {
    f"{sign}{dot}{word}": float(f"{sign}{word}")
    for sign in ("", "-", "+")
    for dot in ("", ".")
    for word in ("inf", "nan")
}


class Plain(str):
    """A scalar written without quotes: the field decides what it is. One in quotes is an ordinary `str`."""

    __slots__ = ()


class TextMapping(dict[str, Any]):
    """A mapping that came as text, from a flag or a variable; `text` is what a field of text takes instead."""

    text: str


class TextList(list[Any]):
    """A list that came as text, from a flag or a variable; `text` is what a field of text takes instead."""

    text: str


class UnreadableError(ValueError):
    """A text that none of its field's types can take; the message says what is accepted."""


class Verbatim:
    """Text in a field without a type, wrapped so that jsonargparse doesn't guess at it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return repr(self.text)


NULLS = frozenset({"", "~", "null", "Null", "NULL"})


def is_null(value: object) -> bool:
    """Whether a value was left empty or written as YAML's null."""
    return isinstance(value, Plain) and value in NULLS


def read_yaml(text: str, label: str) -> Any:
    """The mappings, lists and texts of a YAML document. Tags that would run code are refused.

    Args:
        text: the document.
        label: what it is, for errors: a file's name.
    Raises:
        ConfigError: it is not valid YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{label} is not valid YAML: {error}") from error


def read_argument(text: str) -> Any:
    """The value of a flag or a variable: lists, mappings and quoted text as in YAML, else the text as it is."""
    if text[:1] not in tuple("[{\"'"):
        return Plain(text)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        return Plain(text)
    if isinstance(value, dict | list):
        given = TextMapping(value) if isinstance(value, dict) else TextList(value)
        given.text = text
        return given
    return value


def read_scalar(text: str, kinds: Sequence[Any]) -> object:
    """The value that `text` is for a field whose type is any of `kinds`.

    Text in quotes stays text where the field takes text. Otherwise numbers come before booleans, booleans before
    text; what nothing here reads is returned as it is, for jsonargparse to judge.

    Raises:
        UnreadableError: the field takes a boolean and nothing else, and the text is none.
    """
    is_quoted = not isinstance(text, Plain)
    if str in kinds and (is_quoted or set(kinds) <= {str, type(None)}):
        return str(text)
    for kind, reader in ((int, _read_integer), (float, _read_float), (bool, read_boolean)):
        if kind in kinds:
            value = reader(str(text))
            if value is not None:
                return value
    if str in kinds:
        return str(text)
    if Any in kinds:
        return Verbatim(str(text)) if is_quoted else read_untyped(text)
    if set(kinds) <= {bool, type(None)}:
        words = ", ".join(TRUE_WORDS + FALSE_WORDS)
        raise UnreadableError(f"{str(text)!r} is not a boolean. Expected true or false (or one of: {words}).")
    return str(text)


def read_untyped(text: str) -> object:
    """A scalar without a known type: null, true, false, a number, or else text."""
    if text in NULLS:
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    integer = _read_integer(text)
    if integer is not None:
        return integer
    if _NUMBER.fullmatch(text) or text.lower() in (".inf", "-.inf", "+.inf", ".nan"):
        return _read_float(text)
    return Verbatim(str(text))


def _read_integer(text: str) -> int | None:
    return int(text.replace("_", "")) if _INTEGER.fullmatch(text) else None


def _read_float(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(text.lower())


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without its guesses at types."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = {key for key in written if written.count(key) > 1}
        if twice:
            place = node.start_mark
            raise yaml.MarkedYAMLError(problem=f"keys given twice: {', '.join(sorted(twice))}", problem_mark=place)
        return super().construct_mapping(node, deep)


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return Plain(node.value) if node.style is None else str(node.value)


# Only `<<` keeps its meaning; every other plain scalar is text until its field is known.
_Loader.yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("^<<$"))]}
_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
