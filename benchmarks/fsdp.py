"""What FSDP costs over hand-written `fully_shard` training, and what each process holds; all loops in one run.

`python benchmarks/fsdp.py [--rounds 15] [--quick] [--only trainer] [--workloads small,medium,medium4]
[--parts time,memory]`

It starts its processes itself. How loops take turns and how times are compared is as in `ddp.py`; "medium4" has four
batches to a step. Memory is that of parameters, gradients and the states of AdamW on two processes over that on one:
what all tensors that are alive between backward and the optimizer step take, each memory once, beyond what was alive
before the model was built; and how far the resident memory of the process grew by then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_loops import Blocks
from loops import Loop, chosen
from report import machine, table
from rounds import options_of, run_in_processes, time_report, time_rounds
from torch import Tensor
from torch.nn import functional as F
from workloads import VOCABULARY, Workload

PROCESSES = 2
LOOPS = (
    Loop(name="fully_shard by hand", module="fsdp_loops", function="run_hand_written"),
    Loop(name="by hand, again", module="fsdp_loops", function="run_hand_written"),
    Loop(name="Loopwright Trainer", module="fsdp_loops", function="run_trainer_fsdp"),
    Loop(name="Loopwright Trainer + log", module="fsdp_loops", function="run_trainer_fsdp_log"),
    Loop(name="Loopwright Accelerator", module="fsdp_loops", function="run_accelerator_fsdp"),
)
MEASURED_STEP = 3
_WIDTH, _LAYERS = 512, 10
_ROLE = "LOOPWRIGHT_BENCHMARK_STRATEGY"
"""The environment variable by which a process of this script is told to measure memory."""


def tokens(length: int) -> Any:
    """What makes so many samples of bytes."""

    def make(count: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(0, VOCABULARY, (count, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def _work(name: str, width: int, layers: int, length: int, batch_size: int, block_steps: int) -> Workload:
    return Workload(
        name=name, model=lambda: Blocks(width, layers), data=tokens(length), loss=F.cross_entropy,
        batch_size=batch_size, block_steps=block_steps,
    )  # fmt: skip


_MEDIUM = _work("medium", 192, 4, 64, 8, 12)
WORK = {
    "small": _work("small", 64, 4, 32, 8, 40),
    "medium": _MEDIUM,
    "medium4": replace(_MEDIUM, name="medium4", accumulate=4, block_steps=5),
}


def parse() -> argparse.Namespace:
    """The options."""
    parser = options_of(__doc__, 15)
    parser.add_argument("--workloads", default="small,medium,medium4", help="which of small, medium, medium4 are timed")
    parser.add_argument("--parts", default="time,memory", help="which parts are measured")
    return parser.parse_args()


def work_in_process(options: argparse.Namespace) -> None:
    """Measure times in this process of the group; process 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    if is_main:
        print(f"{machine()}; {PROCESSES} processes over gloo", flush=True)
    for name in options.workloads.split(","):
        work = WORK[name]
        steps = max(work.block_steps // 3, 5) if options.quick else work.block_steps
        seconds = time_rounds(chosen(LOOPS, options.only), work, 3 if options.quick else options.rounds, steps)
        if is_main:
            print(time_report(name, seconds), flush=True)
    dist.destroy_process_group()


def live_bytes() -> int:
    """What the memory of all tensors takes that are alive, each once."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):
            inner: Any = each
            storage = (inner.to_local() if hasattr(inner, "to_local") else inner).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def resident_bytes() -> int:
    """The memory of this process that is in use, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_memory(strategy: str) -> None:
    """Train for some steps and write down what this process holds, into the folder in which it runs."""
    from own_loops import BenchmarkTask

    from loopwright import Callback, Trainer

    torch.set_num_threads(1)
    work = _work("memory", _WIDTH, _LAYERS, 16, 1, MEASURED_STEP)

    class Task(BenchmarkTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Measure(Callback):
        def on_before_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            if trainer.state.step == MEASURED_STEP - 1:
                gc.collect()
                gradients = [parameter.grad for parameter in task.parameters()]  # Python knows of them from here on
                found = {"live": live_bytes() - live_before, "resident": resident_bytes() - resident_before}
                del gradients
                index = trainer.process.process_index
                Path(f"{strategy}-{index}.json").write_text(json.dumps(found))

    trainer = Trainer(
        max_steps=MEASURED_STEP, strategy=strategy, callbacks=[Measure()], progress=False, trackers=False,
        project_dir=Path.cwd(),
    )  # fmt: skip
    _, _, loader = replace(work, model=lambda: torch.nn.Linear(1, 1)).build(2 * MEASURED_STEP)
    gc.collect()
    live_before, resident_before = live_bytes(), resident_bytes()
    trainer.fit(Task(work, _NoTicker()), loader)


class _NoTicker:
    def tick(self) -> None:
        """Nothing."""


def memory_report() -> str:
    """What each of two processes holds, over what one does."""
    with tempfile.TemporaryDirectory() as folder:
        for strategy, count in (("single", 1), ("fsdp", PROCESSES)):
            launcher = (
                [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            )
            # Freed memory is to go back to the system at once.
            environment = {**os.environ, _ROLE: strategy, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, *launcher, str(Path(__file__).resolve())]
            subprocess.run(command, env=environment, cwd=folder, check=True)
        found = {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
    base = found.pop("single-0")
    rows = [("one process", *(f"{base[kind] / 1e6:.1f} MB" for kind in ("live", "resident")), "1.000", "1.000")]
    for name, each in found.items():
        shares = [f"{each[kind] / base[kind]:.3f}" for kind in ("live", "resident")]
        rows.append((name, *(f"{each[kind] / 1e6:.1f} MB" for kind in ("live", "resident")), *shares))
    header = ("process", "live tensors", "resident, growth", "share, live", "share, resident")
    return "\n## Memory of parameters, gradients and AdamW's states\n\n" + table(header, rows)


def main() -> int:
    """Start the processes, or be one of them. Returns the exit code."""
    if _ROLE in os.environ:
        measure_memory(os.environ[_ROLE])
        return 0
    options = parse()
    if "RANK" in os.environ:
        work_in_process(options)
        return 0
    parts, code = options.parts.split(","), 0
    if "time" in parts:
        code = run_in_processes(PROCESSES)
    if "memory" in parts:
        print(memory_report())
    return code


if __name__ == "__main__":
    sys.exit(main())
