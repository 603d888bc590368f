"""Loops of several processes timed against one by hand: they take turns, in many short rounds of one run."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time

import torch.distributed as dist
from loops import Loop
from report import table
from workloads import Workload

Steps = tuple[list[float], list[float]]
"""Of each optimizer step: the time that passed, and the CPU time of all threads of this process."""


class StepClock:
    """Keeps when each batch began; the time of a step is the distance of two, so it holds all that a loop does."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._moments: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note the time."""
        self._moments.append((perf_counter(), process_time()))

    def steps(self) -> Steps:
        """Both times of each step. The first steps, in which torch prepares its own, are left out."""
        starts = self._moments[2 * self._accumulate :: self._accumulate]
        wall, cpu = ([later[i] - earlier[i] for earlier, later in pairwise(starts)] for i in range(2))
        return wall, cpu


def options_of(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks of this kind have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each table")
    parser.add_argument("--quick", action="store_true", help="three short rounds: for a first look")
    parser.add_argument("--only", default="", help="loops whose name has one of these words (by hand is always there)")
    return parser


def time_rounds(loops: Sequence[Loop], work: Workload, rounds: int, steps: int) -> dict[str, list[Steps]]:
    """Time each loop once a round; the loop that begins moves on by one each round.

    Returns:
        For each loop's name the seconds of the optimizer steps in each round.
    """
    seconds: dict[str, list[Steps]] = {loop.name: [] for loop in loops}
    for turn in range(-1, rounds):
        first = max(turn, 0) % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            clock = StepClock(work.accumulate)
            gc.collect()  # what the loop before left behind is not this one's
            dist.barrier()
            loop.run(work, clock, steps)
            if turn >= 0:  # the round before the first one warms up: imports, caches, allocator
                seconds[loop.name].append(clock.steps())
    return seconds


def quickest(rounds: Sequence[Sequence[float]]) -> float:
    """The 5th percentile of the steps of all rounds: what a step takes when nothing else holds it up."""
    times = sorted(time for steps in rounds for time in steps)
    return times[len(times) // 20]


def ratios(rounds: Sequence[Steps], base: Sequence[Steps], kind: int) -> tuple[str, str]:
    """A loop's times over those by hand: the median over rounds, and that of the quickest steps."""
    own, other = ([steps[kind] for steps in each] for each in (rounds, base))
    within = [median(a) / median(b) for a, b in zip(own, other, strict=True)]
    return f"{median(within):.3f}", f"{quickest(own) / quickest(other):.3f}"


def time_report(name: str, seconds: dict[str, list[Steps]]) -> str:
    """Each loop's time over that of the first one, which is by hand, in the same round."""
    base = next(iter(seconds.values()))
    rows = []
    for loop, rounds in seconds.items():
        over = quickest([wall for wall, _ in rounds]) - quickest([wall for wall, _ in base])
        rows.append((loop, *ratios(rounds, base, 0), *ratios(rounds, base, 1), f"{over * 1e6:+.0f}"))
    by_hand = [f"{quickest([steps[kind] for steps in base]) * 1e6:.0f} us" for kind in range(2)]
    title = f"\n## Time per optimizer step, {name}: by hand {by_hand[0]}, CPU {by_hand[1]}, {len(base)} rounds\n\n"
    return title + table(("loop", "median", "quiet", "CPU median", "CPU quiet", "over by hand, us (quiet)"), rows)


def run_in_processes(count: int) -> int:
    """Run this script again in so many processes of one thread. Returns their exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
