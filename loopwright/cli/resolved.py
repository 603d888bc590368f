"""A parsed configuration as plain values, and as YAML that reads back as the same configuration."""

from __future__ import annotations

import datetime
import inspect
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import yaml
from jsonargparse import Namespace

from ..distributed.environment import read_boolean
from .scalars import Verbatim, read_untyped


def plain_values(config: Namespace) -> dict[str, Any]:
    """Nested dicts, lists, texts, numbers, booleans and None.

    A default that is none of these, such as an object made in a signature, is left out: it comes back as the default.
    """
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def to_yaml(values: Mapping[str, Any]) -> str:
    """The values as a YAML document whose texts and numbers `loopwright` reads back as they are."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def without_wrappers(value: Any) -> Any:
    """The value with every `Verbatim` in it as its text."""
    if isinstance(value, Verbatim):
        return value.text
    if type(value) is dict:
        return {key: without_wrappers(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_wrappers(item) for item in value)
    return value


class _NotPlainError(Exception):
    """A value that a file can't hold."""


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Verbatim):
        return value.text
    if isinstance(value, Namespace | dict):
        return _plain_mapping(vars(value) if isinstance(value, Namespace) else value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, os.PathLike | datetime.timedelta):
        return str(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise _NotPlainError


def _plain_mapping(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    plain = {}
    for key, value in mapping.items():
        try:
            plain[key] = _plain(value)
        except _NotPlainError:
            continue  # only a default can be such an object; leaving it out keeps it
    return plain


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, with texts in quotes where plain ones would be read as something else."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_text = isinstance(read_untyped(text), Verbatim) and read_boolean(text) is None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_text else "'")


_Dumper.add_representer(str, _represent_text)
