"""What reaches a tracker as a configuration: plain values without secrets, nested or flat."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import types
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy
import torch

from .secrets import HIDDEN, hide_passwords, is_secret
from .values import to_number

Scalar: TypeAlias = str | int | float | bool | None

_MAX_REPR = 500
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """The configuration as nested dicts and lists of texts, numbers, booleans and None.

    Dataclasses, namespaces and named tuples become dicts; enums their value where it is a text, else their name; paths
    texts; tensors of one element numbers, larger ones their shape and dtype; functions and classes their dotted name;
    anything else its repr without memory addresses. Secrets, by the name of their key, become "***".
    """
    return _plain_mapping(config, frozenset({id(config)}))


def flatten_config(config: Mapping[Any, Any]) -> dict[str, Scalar]:
    """The configuration as one level of dotted keys: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    A list of plain values becomes its JSON text; the items of other lists get numbered keys. Where two keys would be
    the same, the later one gets a "_" at its end.
    """
    flat: dict[str, Scalar] = {}
    for key, value in plain_config(config).items():
        _flatten(key, value, flat)
    return flat


def _flatten(key: str, value: Any, flat: dict[str, Scalar]) -> None:
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        flat[_free_key(key, flat)] = json.dumps(value) if isinstance(value, dict | list) else value
        return
    for name, item in items:
        _flatten(f"{key}.{name}", item, flat)


def _free_key(key: str, taken: Collection[str]) -> str:
    while key in taken:
        key += "_"
    return key


def _plain_mapping(mapping: Mapping[Any, Any], inside: frozenset[int]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in mapping.items():
        name = _free_key(key.name if isinstance(key, Enum) else str(key), plain)
        plain[name] = HIDDEN if is_secret(name, value) else _plain(value, inside)
    return plain


def _plain(value: Any, inside: frozenset[int]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, str):
        return hide_passwords(str(value))
    number = to_number(value)
    if number is not None:
        return number
    return _plain_container(value, inside)


def _plain_container(value: Any, inside: frozenset[int]) -> Any:
    if id(value) in inside:
        return "<cycle>"
    inside |= {id(value)}
    fields = _fields(value)
    if fields is not None:
        return _plain_mapping(fields, inside)
    if isinstance(value, list | tuple):
        return [_plain(item, inside) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, inside) for item in value), key=repr)
    return hide_passwords(_describe(value))


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The named parts of a value that is made of such, else None."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    return dict(zip(names, value, strict=True)) if names else None


def _describe(value: Any) -> str:
    """One stable line or a few for a value that has no plain form."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, torch.device | torch.dtype):
        return str(value)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    return _ADDRESS.sub("", _repr(value))[:_MAX_REPR]


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001
        # A broken `__repr__` of some object of the user's is no reason to lose the run.
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
