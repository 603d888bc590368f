from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
