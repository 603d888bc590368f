"""What a loop costs over the raw PyTorch loop: time per step and Python calls per step, all loops in one run.

`python benchmarks/overhead.py [--rounds 30] [--quick] [--only raw,trainer] [--parts calls,time,import] [--breakdown]`

Time is the 5th percentile of the steps of a round; the loops take turns in each round, from another start each time;
a ratio is formed within its round. Only ratios of one run mean anything. "raw PyTorch, again" shows the noise.
Python calls are exact: the `call` events of `sys.setprofile` over 200 steps after 60, so no set-up is in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from imports import import_report, start_report
from loops import ADDITIONS, BARE, LOOPS, RAW, Loop, chosen
from measure import count_calls, time_rounds
from report import additions_report, breakdown_report, calls_report, machine, time_report
from workloads import LINEAR, TINY, WORKLOADS


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per workload")
    parser.add_argument("--quick", action="store_true", help="three short rounds: for a first look")
    parser.add_argument("--only", default="", help="loops whose name has one of these words (raw is always there)")
    parser.add_argument("--workloads", default="tiny,mid,tiny8", help="which of tiny, mid, tiny8 are timed")
    parser.add_argument("--parts", default="calls,time,import", help="which parts are measured")
    parser.add_argument("--breakdown", action="store_true", help="each function's calls over raw, for Loopwright")
    return parser.parse_args()


def report_calls(loops: Sequence[Loop], *, breakdown: bool) -> None:
    """Print the calls per step, what small additions add, and where the calls are."""
    loops = [loop for loop in loops if not loop.needs_accumulation]
    counts = {loop.name: count_calls(loop, TINY) for loop in loops}
    linear = {loop.name: count_calls(loop, LINEAR) for loop in loops}
    print(calls_report(counts, linear), flush=True)
    if BARE in counts:
        added = {loop.name: count_calls(loop, TINY) for loop in ADDITIONS}
        print(additions_report(counts[BARE], added), flush=True)
    if breakdown:
        for name in (name for name in counts if name.startswith("Loopwright")):
            print(breakdown_report(name, counts[RAW], counts[name]), flush=True)


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(1)
    loops = chosen(LOOPS, options.only)
    print(machine())
    parts = options.parts.split(",")
    if "calls" in parts:
        report_calls(loops, breakdown=options.breakdown)
    if "time" in parts:
        for name in options.workloads.split(","):
            rounds = 3 if options.quick else options.rounds
            print(time_report(name, time_rounds(loops, WORKLOADS[name], rounds, quick=options.quick)), flush=True)
    if "import" in parts:
        print(import_report(repeats=1 if options.quick else 5), flush=True)
        print(start_report(repeats=3 if options.quick else 10), flush=True)


if __name__ == "__main__":
    main()
