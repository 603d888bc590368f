"""What reaches a tracker as a metric: plain Python numbers, whatever was logged."""

from __future__ import annotations

import logging
import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor

logger = logging.getLogger(__name__)

_LARGEST = sys.float_info.max


def to_number(value: object) -> int | float | None:
    """The one plain number that `value` holds, or None where it holds something else or more than one.

    Integers stay integers and so stay exact; booleans become 0 or 1; NaN and the infinities stay. Tensors and arrays
    of one element are read whatever their shape, dtype or device, and detached. An integer that no float can hold is
    infinite.
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        return _read_item(value.detach()) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, numbers.Real):
        return _read_real(value)
    # NumPy's booleans and arrays, and the arrays of other libraries.
    size = getattr(value, "size", None)
    return _read_item(value) if isinstance(size, int) and size == 1 and hasattr(value, "item") else None


def _read_item(array: Any) -> int | float | None:
    item = array.item()
    return _read_real(item) if isinstance(item, numbers.Real) else None


def _read_real(value: Any) -> int | float:
    is_whole, is_exact = isinstance(value, numbers.Integral), isinstance(value, numbers.Rational)
    number = int(value) if is_whole else value
    if is_exact and not -_LARGEST <= number <= _LARGEST:
        return math.inf if number > 0 else -math.inf
    return int(number) if is_whole else float(number)


class MetricCleaner:
    """Makes records of plain numbers, and says once per name what it leaves out."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def clean(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """The record with plain numbers alone.

        None is left out. So is what is not one number (a text, a tensor of several elements), with one warning per
        name.
        """
        cleaned: dict[str, float] = {}
        for name, value in metrics.items():
            number = to_number(value)
            if number is not None:
                cleaned[str(name)] = number
            elif value is not None:
                self._report(str(name), value)
        return cleaned

    def _report(self, name: str, value: object) -> None:
        if name in self._reported:
            return
        self._reported.add(name)
        logger.warning(
            "metric %r holds %s, not one number: trackers don't get it. Log a number, or a tensor of one element. "
            "This is said once.",
            name,
            _describe(value),
        )


def _describe(value: object) -> str:
    kind = type(value).__name__
    shape = f" and shape {tuple(value.shape)}" if isinstance(value, Tensor | numpy.ndarray) else ""
    return f"a value of type {kind}{shape}"
