"""Sizes: as users write them, and of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from .errors import ConfigError

_BYTES = {
    "": 1.0, "b": 1.0,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def convert_file_size_to_int(size: int | str) -> int:
    """A size in bytes.

    Args:
        size: bytes, or a number with a unit: `"5MB"` (10^6 bytes), `"5MiB"` (2^20 bytes), and the same with K, G, T. A
            small `b` at the end of the units without `i` counts bits: `"5Mb"` is 625,000 bytes.
    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None or found[2].lower() not in _BYTES:
        raise ConfigError(f"size={size!r}. Expected a number of bytes, or text such as '500MB', '1.5GB', '10GiB'.")
    unit = found[2]
    bits = 8 if len(unit) == 2 and unit.endswith("b") and not unit.islower() else 1
    return int(float(found[1]) * _BYTES[unit.lower()] / bits)


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """What the elements of these tensors take, in bytes; one that is given twice counts twice. Local.

    Args:
        tensors: on any device, "meta" included; lazy ones have no size and can't be among them.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
