"""What the Trainer costs over DeepSpeed's engine driven by hand, on two processes; all loops in one run.

`python benchmarks/zero.py [--rounds 12] [--quick] [--only trainer] [--stages 1,2,3]`

It starts its processes itself. How loops take turns and how times are compared is as in `ddp.py`. A step has two
micro-batches and is clipped; by hand that is DeepSpeed's own accumulation and clipping.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from loops import Loop, chosen
from report import machine
from rounds import options_of, run_in_processes, time_report, time_rounds
from workloads import WORKLOADS

PROCESSES = 2
LOOPS = (
    Loop(name="DeepSpeed by hand", module="zero_loops", function="run_hand_written", package="deepspeed"),
    Loop(name="by hand, again", module="zero_loops", function="run_hand_written", package="deepspeed"),
    Loop(name="Loopwright Trainer", module="zero_loops", function="run_trainer", package="deepspeed"),
    Loop(name="Loopwright Accelerator", module="zero_loops", function="run_accelerator", package="deepspeed"),
)
WORK = replace(WORKLOADS["mid"], name="medium", accumulate=2, batch_size=4, block_steps=8)


def parse() -> argparse.Namespace:
    """The options."""
    parser = options_of(__doc__, 12)
    parser.add_argument("--stages", default="1,2,3", help="which stages of ZeRO are timed")
    return parser.parse_args()


def work_in_process(options: argparse.Namespace) -> None:
    """Measure in this process of the group; process 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    if is_main:
        print(f"{machine()}; {PROCESSES} processes over gloo", flush=True)
    for stage in options.stages.split(","):
        os.environ["LOOPWRIGHT_BENCHMARK_STAGE"] = stage
        rounds, steps = (3, 5) if options.quick else (options.rounds, WORK.block_steps)
        seconds = time_rounds(chosen(LOOPS, options.only), WORK, rounds, steps)
        if is_main:
            print(time_report(f"ZeRO stage {stage}", seconds), flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Start the processes, or be one of them."""
    options = parse()
    if "RANK" not in os.environ:
        return run_in_processes(PROCESSES)
    work_in_process(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
