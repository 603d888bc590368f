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
import os
import sys
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from loops import Loop, chosen
from report import machine, table
from rounds import options_of, run_in_processes, time_report, time_rounds
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
    parser = options_of(__doc__, 25)
    parser.add_argument("--workloads", default="small,medium", help="which of small, medium, large are timed")
    parser.add_argument("--parts", default="sends,time", help="which parts are measured")
    return parser.parse_args()


def count_sends(loop: Loop, work: Workload) -> Counter[str]:
    """What this process sends, by name."""
    counter = SendCounter()
    dist.barrier()
    loop.run(work, counter, WARM_STEPS + COUNTED_STEPS + 2)
    return counter.counts


def sends_report(counts: dict[str, Counter[str]]) -> str:
    """What each loop sends in an optimizer step of `ACCUMULATE` batches."""
    kinds = sorted({kind for counter in counts.values() for kind in counter} | {"all_reduce"})
    rows = [(name, *(f"{counter[kind] / COUNTED_STEPS:.2f}" for kind in kinds)) for name, counter in counts.items()]
    title = f"\n## Sent per optimizer step of {ACCUMULATE} batches, small model (one bucket)\n\n"
    return title + table(("loop", *kinds), rows)


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
    return run_in_processes(PROCESSES)


if __name__ == "__main__":
    sys.exit(main())
