"""What a step costs on two processes over hand-written DDP, and what is sent in it; all loops in one run.

`python benchmarks/ddp.py [--rounds 25] [--quick] [--only trainer] [--workloads small,medium,large]
[--parts sends,time]`

It starts its processes itself. The loops take turns, from another start in each of many short rounds; take more of
them (`--rounds 60`) on a machine that does other work. A step has 4 batches; a ratio is formed of the medians of the
steps of one round, and "median" is that of the rounds. "quiet" compares the quickest steps (5th percentile) of all
rounds, those that nothing else held up. "CPU" is the same for the CPU time of all threads of process 0, in which
waiting for the other process is left out. Only ratios of one run mean anything, and "DDP by hand, again" shows their
noise. Collectives are counted by torch's profiler; messages are what Loopwright sends through shared memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from loops import Loop, chosen
from report import machine, table
from ticks import WARM_STEPS
from workloads import WIDE, WORKLOADS, Workload

from loopwright.distributed.slots import channel

PROCESSES = 2
ACCUMULATE = 4
COUNTED_STEPS = 20
HAND = "DDP by hand"
LOOPS = (
    Loop(name=HAND, module="ddp_loops", function="run_hand_written"),
    Loop(name=f"{HAND}, again", module="ddp_loops", function="run_hand_written"),
    Loop(name="Loopwright Trainer", module="ddp_loops", function="run_trainer_ddp"),
    Loop(name="Loopwright Trainer + log", module="ddp_loops", function="run_trainer_ddp_log"),
    Loop(name="Loopwright Accelerator", module="ddp_loops", function="run_accelerator_ddp"),
)
WORK = {
    "small": replace(WORKLOADS["tiny"], name="small", accumulate=ACCUMULATE, block_steps=60),
    "medium": replace(WIDE, name="medium", accumulate=ACCUMULATE, block_steps=30),
    "large": replace(WORKLOADS["mid"], name="large", accumulate=ACCUMULATE, block_steps=6),
}
"""Steps of about 1, 10 and 100 ms on one core."""


Steps = tuple[list[float], list[float]]
"""Of each optimizer step: the time that passed, and the CPU time of all threads of this process."""


class StepClock:
    """Keeps when each batch began; the time of a step is the distance of two, so it holds all that a loop does."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note the time."""
        self._moments.append((perf_counter(), process_time()))

    def steps(self) -> Steps:
        """Both times of each step. The first steps, in which DDP orders its buckets, are left out."""
        starts = self._moments[2 * ACCUMULATE :: ACCUMULATE]
        wall, cpu = ([later[i] - earlier[i] for earlier, later in pairwise(starts)] for i in range(2))
        return wall, cpu


class SendCounter:
    """Counts what `COUNTED_STEPS` optimizer steps send: collectives by their names, and control messages."""

    def __init__(self) -> None:
        self._batch = 0
        self._profiler: torch.profiler.profile | None = None
        self._messages_before = 0
        self.counts: Counter[str] = Counter()

    def tick(self) -> None:
        """Begin or end counting at the batch where it is due."""
        if self._batch == WARM_STEPS * ACCUMULATE:
            self._messages_before = channel().num_sent  # first: what opens it is not counted
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()
        elif self._batch == (WARM_STEPS + COUNTED_STEPS) * ACCUMULATE and self._profiler is not None:
            self._profiler.stop()
            names = (event.name for event in self._profiler.events() if event.name.startswith("gloo:"))
            self.counts = Counter(name.removeprefix("gloo:") for name in names)
            self.counts["message"] = channel().num_sent - self._messages_before
        self._batch += 1


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="rounds per workload")
    parser.add_argument("--quick", action="store_true", help="three short rounds: for a first look")
    parser.add_argument("--only", default="", help="loops whose name has one of these words (by hand is always there)")
    parser.add_argument("--workloads", default="small,medium", help="which of small, medium, large are timed")
    parser.add_argument("--parts", default="sends,time", help="which parts are measured")
    return parser.parse_args()


def count_sends(loop: Loop, work: Workload) -> Counter[str]:
    """What this process sends, by name."""
    counter = SendCounter()
    dist.barrier()
    loop.run(work, counter, WARM_STEPS + COUNTED_STEPS + 2)
    return counter.counts


def time_rounds(loops: Sequence[Loop], work: Workload, rounds: int, steps: int) -> dict[str, list[Steps]]:
    """Time each loop once a round; the loop that begins moves on by one each round.

    Returns:
        For each loop's name the seconds of the optimizer steps in each round.
    """
    seconds: dict[str, list[Steps]] = {loop.name: [] for loop in loops}
    for turn in range(-1, rounds):
        first = max(turn, 0) % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            clock = StepClock()
            gc.collect()  # what the loop before left behind is not this one's
            dist.barrier()
            loop.run(work, clock, steps)
            if turn >= 0:  # the round before the first one warms up: imports, caches, allocator
                seconds[loop.name].append(clock.steps())
    return seconds


def sends_report(counts: dict[str, Counter[str]]) -> str:
    """What each loop sends in an optimizer step of `ACCUMULATE` batches."""
    kinds = sorted({kind for counter in counts.values() for kind in counter} | {"all_reduce"})
    rows = [(name, *(f"{counter[kind] / COUNTED_STEPS:.2f}" for kind in kinds)) for name, counter in counts.items()]
    title = f"\n## Sent per optimizer step of {ACCUMULATE} batches, small model (one bucket)\n\n"
    return title + table(("loop", *kinds), rows)


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
    """Each loop's time over that of the loop by hand in the same round."""
    base = seconds[HAND]
    rows = []
    for loop, rounds in seconds.items():
        over = quickest([wall for wall, _ in rounds]) - quickest([wall for wall, _ in base])
        rows.append((loop, *ratios(rounds, base, 0), *ratios(rounds, base, 1), f"{over * 1e6:+.0f}"))
    by_hand = [f"{quickest([steps[kind] for steps in base]) * 1e6:.0f} us" for kind in range(2)]
    title = f"\n## Time per optimizer step, {name}: by hand {by_hand[0]}, CPU {by_hand[1]}, {len(base)} rounds\n\n"
    return title + table(("loop", "median", "quiet", "CPU median", "CPU quiet", "over by hand, us (quiet)"), rows)


def work_in_process(options: argparse.Namespace) -> None:
    """Measure in this process of the group; process 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loops, parts, is_main = chosen(LOOPS, options.only), options.parts.split(","), dist.get_rank() == 0
    if is_main:
        print(f"{machine()}; {PROCESSES} processes over gloo")
    if "sends" in parts:
        counts = {loop.name: count_sends(loop, WORK["small"]) for loop in loops}
        if is_main:
            print(sends_report(counts), flush=True)
    for name in options.workloads.split(",") if "time" in parts else ():
        work = WORK[name]
        steps = max(work.block_steps // 3, 5) if options.quick else work.block_steps
        seconds = time_rounds(loops, work, 3 if options.quick else options.rounds, steps)
        if is_main:
            print(time_report(name, seconds), flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Start the processes, or be one of them. Returns the exit code."""
    options = parse()
    if "RANK" in os.environ:
        work_in_process(options)
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    return subprocess.run([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
