"""YAML in which the field, and not the spelling, decides a value's type.

YAML 1.1 reads `1e-3` as text, `007` as a number and `no` as a boolean, whatever the field is. Here every scalar
stays the text that was written; `scalars.read_scalar` gives it its type once the field is known.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from ..distributed.errors import ConfigError


class Plain(str):
    """A scalar written without quotes: the field decides what it is. One in quotes is an ordinary `str`."""

    __slots__ = ()


class TextMapping(dict[str, Any]):
    """A mapping that came as text, from a flag or a variable; `text` is what a field of text takes instead."""

    text: str


class TextList(list[Any]):
    """A list that came as text, from a flag or a variable; `text` is what a field of text takes instead."""

    text: str


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
