"""NumPy's arrays and scalars in a state tree: their bytes, and NumPy's word for how to read them."""

from __future__ import annotations

import base64
import sys
from typing import Any

import torch
from torch import Tensor

from .scalars import TAG

_KINDS = "biufcmMSU"
"""Booleans, numbers, times and texts of a fixed size."""


def is_array(value: object) -> bool:
    """Whether this is an array or a scalar of NumPy, exactly of its own classes. Local."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or _is_scalar(value))


def encode(value: Any) -> tuple[dict[str, Any], Tensor | None]:
    """A JSON object for an array, and its bytes as a tensor; for a scalar the object alone. Local.

    Raises:
        TypeError: its kind of elements can't be stored; says why.
    """
    if value.dtype.kind not in _KINDS:
        raise TypeError(f"its elements are of the dtype {value.dtype}; store plain numbers, times or texts")
    if _is_scalar(value):
        data = base64.b64encode(value.tobytes()).decode()
        return {TAG: "numpy", "dtype": value.dtype.str, "base64": data}, None
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    node = {TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "order": order}
    return node, torch.from_numpy(_bytes_of(value, order))


def decode(node: dict[str, Any], data: Tensor | None) -> Any:
    """The array or the scalar of a JSON object. Local."""
    import numpy

    dtype = numpy.dtype(str(node["dtype"]))
    if dtype.kind not in _KINDS:
        raise TypeError(f"NumPy's dtype {node['dtype']!r} is none that can be stored")
    if data is None:
        return numpy.frombuffer(base64.b64decode(node["base64"], validate=True), dtype)[0]
    return data.numpy().view(dtype).reshape(node["shape"], order=node["order"])


def _bytes_of(array: Any, order: str) -> Any:
    """The bytes of an array, in its own memory where it is contiguous and may be written to."""
    import numpy

    plain = array if array.flags.writeable else array.copy(order)
    return numpy.ascontiguousarray(plain.reshape(-1, order=order)).view(numpy.uint8)


def _is_scalar(value: object) -> bool:
    numpy = sys.modules["numpy"]
    return isinstance(value, numpy.generic) and type(value).__module__ == "numpy"
