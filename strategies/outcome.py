"""What became of an optimizer step."""

from __future__ import annotations

import enum


class StepOutcome(enum.Enum):
    """What `Strategy.step` did. Schedulers, averages, `on_step` and the step counter read this; nothing guesses."""

    ACCUMULATED = "accumulated"
    """Nothing: gradients are still being accumulated."""
    APPLIED = "applied"
    """The weights were updated."""
    SKIPPED = "skipped"
    """The step was due and was dropped: an fp16 overflow, a window without a loss, or a callback's `SkipBatch`."""
