"""The small values of a state tree that JSON has no word for, each as an object whose key `$` names its type.

JSON itself carries texts, booleans, None, integers of 64 bits and finite numbers. All else is built here from those
words, and from no code that a file could name: of classes only enumerations are looked up, and those that the program
has defined by itself.
"""

from __future__ import annotations

import base64
import enum
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

_ENDS = ("start", "stop", "step")
TAG = "$"
"""The key that says what an object stands for."""
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}
"""The number formats that tensors of a tree may have, by the names that files have for them."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a number format: `"float32"`. Local."""
    return str(dtype).removeprefix("torch.")


def encode_float(value: float) -> Any:
    """A number for JSON: itself, or where it is not finite its 64 bits in hexadecimal digits. Local."""
    return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}


def encode_int(value: int) -> Any:
    """An integer for JSON: itself where 64 bits hold it, as readers expect, else hexadecimal digits. Local."""
    return value if -(2**63) <= value < 2**63 else {TAG: "int", "hex": hex(value)}


def encode_text(value: str) -> Any:
    """A text for JSON: itself, or where it has surrogates, which are no characters, its bytes. Local."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {TAG: "str", "base64": _to_base64(value.encode("utf-8", "surrogatepass"))}
    return value


def encode_enum(member: enum.Enum) -> Any:
    """A member of an enumeration: the place of its class, and its name; of a set of flags the number. Local.

    Raises:
        LookupError: the class can't be found again by its name; says why.
    """
    kind = type(member)
    place = f"{kind.__module__}:{kind.__qualname__}"
    if _find_enum(place) is not kind:
        raise LookupError(f"its class {kind.__qualname__} is not found under its name in {kind.__module__!r}")
    if kind.__members__.get(member.name or "") is member:
        return {TAG: "enum", "class": place, "name": member.name}
    return {TAG: "enum", "class": place, "value": member.value}


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


SMALL: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    str: encode_text,
    complex: lambda value: {TAG: "complex", "real": encode_float(value.real), "imag": encode_float(value.imag)},
    bytes: lambda value: {TAG: "bytes", "base64": _to_base64(value)},
    bytearray: lambda value: {TAG: "bytearray", "base64": _to_base64(value)},
    range: lambda value: {TAG: "range", **{name: encode_int(getattr(value, name)) for name in _ENDS}},
    torch.dtype: lambda value: {TAG: "dtype", "name": dtype_name(value)},
    torch.device: lambda value: {TAG: "device", "name": str(value)},
}
"""For each type of small values, exactly that type, what makes JSON of it."""


def _decode_float(node: dict[str, Any]) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(node["bits"]))[0]
    return value


def _decode_int(value: Any) -> int:
    return int(value["hex"], 16) if isinstance(value, dict) else int(value)


def _decode_part(value: Any) -> float:
    return _decode_float(value) if isinstance(value, dict) else float(value)


def _decode_enum(node: dict[str, Any]) -> enum.Enum:
    kind = _find_enum(node["class"])
    if kind is None:
        raise LookupError(
            f"it holds a value of the enumeration {node['class']!r}, which this program has not defined. Import its "
            "module before you load"
        )
    if "name" in node:
        if node["name"] not in kind.__members__:
            raise LookupError(f"the enumeration {node['class']!r} has no member {node['name']!r} any more")
        return kind[node["name"]]
    if not issubclass(kind, enum.Flag):
        raise LookupError(f"the enumeration {node['class']!r} is no set of flags any more")
    return kind(int(node["value"]))


def _find_enum(place: str) -> type[enum.Enum] | None:
    """The enumeration of that place among the modules that are imported already; nothing is imported."""
    module, _, qualname = place.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # The dictionaries and not attributes: nothing of a module or a class may run because a file names it.
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


SMALL_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": _decode_float,
    "int": _decode_int,
    "str": lambda node: base64.b64decode(node["base64"], validate=True).decode("utf-8", "surrogatepass"),
    "complex": lambda node: complex(_decode_part(node["real"]), _decode_part(node["imag"])),
    "bytes": lambda node: base64.b64decode(node["base64"], validate=True),
    "bytearray": lambda node: bytearray(base64.b64decode(node["base64"], validate=True)),
    "range": lambda node: range(*(_decode_int(node[name]) for name in _ENDS)),
    "dtype": lambda node: DTYPES[node["name"]],
    "device": lambda node: torch.device(node["name"]),
    "enum": _decode_enum,
}
"""For each word under `$` what makes the small value of the object again."""
