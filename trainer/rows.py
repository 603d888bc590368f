"""`Row` and `Flag`: what one process says in a vector."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One process's part of a vector: numbers, as they travel."""

    flags: float
    """What it says, by `Flag`."""
    seconds: float
    """The run's time by its own clock; that of process 0 holds."""
    size: float
    """The losses of its open window; at the begin of a pass the samples of its first batch."""
    loss_count: float
    """The sum of its losses' counts, where they are on the CPU."""
    samples: float
    """Those that it has seen since its last vector."""
    tokens: float
    """The same of tokens."""
    batch: float
    """Its counter of micro-batches in the epoch; the largest one holds."""
    micro_step: float
    """That of the run."""


class Flag:
    """What one process says in a vector. Each holds for all as soon as any process says it.

    Plain integers: those of `enum` take their time, and there are a dozen operations on them in each step.
    """

    ENDED = 1 << 0
    """Its data ends with this window, and so does the pass."""
    STOP = 1 << 1
    """The run is to end at this boundary, when what is due was done."""
    STOP_NOW = 1 << 2
    """`StopRun` was raised: the run is to end before anything else."""
    END_EPOCH = 1 << 3
    """`EndEpoch` was raised."""
    DROP = 1 << 4
    """Control flow left the window before its gradients were reduced: nobody steps on it."""
    SKIP = 1 << 5
    """A callback drops this step."""
    NONFINITE = 1 << 6
    """It does so for a value that is not finite."""
    SIGNAL = 1 << 7
    """A signal asked this process to end."""
    COUNTS = 1 << 8
    """Its steps return `(loss_sum, count)`."""
    MEANS = 1 << 9
    """Its steps return mean losses."""
    DEVICE_COUNT = 1 << 10
    """Its count is on the device, where it has to be added up."""
    DONE = 1 << 11
    """It has no batch of an evaluation left."""
    SPLIT = 1 << 12
    """It ran out of memory: from now on all train batches in smaller parts."""


NOTHING = 0


def flags_of(rows: list[Row]) -> int:
    """What any of the processes says."""
    flags = NOTHING
    for row in rows:
        flags |= int(row.flags)
    return flags


def saying(flag: int, rows: list[Row]) -> list[int]:
    """The processes that say it."""
    return [index for index, row in enumerate(rows) if int(row.flags) & flag]
