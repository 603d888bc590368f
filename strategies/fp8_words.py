"""Accelerate's words for options of FP8; the command line reads them without loading torch."""

from __future__ import annotations

BACKENDS = ("ao", "te", "msamp")
"""What computes: torchao, Transformer Engine, MS-AMP."""
FORMATS = ("HYBRID", "E4M3", "E5M2")
"""The numbers of Transformer Engine."""
AMAX_ALGORITHMS = ("max", "most_recent")
"""Which of the largest values it scales by."""
OPT_LEVELS = ("O1", "O2")
"""What MS-AMP keeps in FP8."""
