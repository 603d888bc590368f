"""Run the loops, in turn, and keep what was seen."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from loops import Loop
from ticks import WARM_STEPS, CallCounter, StepTimer
from workloads import Workload

COUNTED_STEPS = 200
"""A multiple of the 50 steps between two records, so that a record's cost is spread as it is in a long run."""


def count_calls(loop: Loop, work: Workload) -> CallCounter:
    """Count one loop's calls per optimizer step."""
    counter = CallCounter(work.accumulate, COUNTED_STEPS)
    loop.run(work, counter, WARM_STEPS + COUNTED_STEPS + 10)
    return counter


def time_rounds(loops: Sequence[Loop], work: Workload, rounds: int, *, quick: bool = False) -> dict[str, list[float]]:
    """Time each loop once a round; the loop that begins moves on by one each round.

    Returns:
        For each loop's name the seconds per optimizer step in each round.
    """
    loops = [loop for loop in loops if work.accumulate > 1 or not loop.needs_accumulation]
    steps = max(work.block_steps // 3, 20) if quick else work.block_steps
    seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    for turn in range(-1, rounds):
        first = max(turn, 0) % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            time = _time_once(loop, work, steps)
            if turn >= 0:  # the round before the first one warms up: imports, caches, allocator
                seconds[loop.name].append(time)
        _tell(f"{work.name}: round {turn + 1} of {rounds}")
    return seconds


def _time_once(loop: Loop, work: Workload, steps: int) -> float:
    timer = StepTimer(work.accumulate)
    gc.collect()  # what the loop before left behind is not this one's
    loop.run(work, timer, steps)
    return timer.undisturbed_seconds()


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)
