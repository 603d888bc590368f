"""A GPT of 12 blocks compiled whole, and its blocks alone: graphs, the time to compile, and that of a step.

    python benchmarks/compile.py                                     # both, by inductor; some minutes
    python benchmarks/compile.py --parts count --backend aot_eager   # the graphs alone

Each way compiles in a process of its own with an empty cache; what any first compilation takes (imports, the C++
compiler's headers) is done before. Then both train in turn in one process, in many short rounds. Times are the CPU's,
of one thread and of the programs that it starts, so that what else runs on the machine does not count. It fails where
`regional` compiles more than one graph for all blocks, takes more than half the time of `whole` to compile, or more
than 1.05 times its time per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from report import machine, table
from rounds import StepClock

from loopwright import Callback, Trainer, set_seed
from loopwright.recipes.bytes_gpt.task import BytesGPT

WAYS = {"whole": False, "regional": True}
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""glibc's malloc keeps what is freed, as allocators of devices do. Else getting the optimizer's temporaries from the
system again takes more than what is compared, and how much of it depends on what the backward pass has left."""
COMPILE_SHARE, STEP_RATIO = 0.5, 1.05
"""Accepted of `regional` over `whole`."""
CONTEXT = 128


class Ticks(Callback):
    """Tells a clock of each batch."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self._clock.tick()


class Way:
    """One model that is compiled in one way, and trained again and again.

    Args:
        regional: whether its blocks alone are compiled.
        options: the benchmark's.
    """

    def __init__(self, regional: bool, options: argparse.Namespace) -> None:
        set_seed(0)
        self._compile = {"regional": regional, "backend": options.backend, "fullgraph": True}
        sizes = {"width": options.width, "num_heads": options.width // 64, "num_layers": options.layers}
        self._task = BytesGPT(**sizes, context=CONTEXT)
        text = torch.randint(0, 256, (options.batch_size, CONTEXT + 1))
        self._batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def train(self, steps: int) -> list[float]:
        """Train so many steps. Returns the CPU seconds of each, without the first two."""
        clock = StepClock(accumulate=1)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                max_steps=steps, compile=self._compile, trackers=False, progress=False, val_every=None,
                callbacks=Ticks(clock), project_dir=folder,
            )  # fmt: skip
            trainer.fit(self._task, [self._batch] * steps)
        return clock.steps()[1]


def first_step(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Compile one way in this process. Returns the CPU seconds of its first step, and how many graphs it has."""
    from torch._dynamo.utils import counters

    warm = torch.compile(lambda numbers: (numbers.sin() + 1).sum(), backend=options.backend)
    warm(torch.ones(8, requires_grad=True)).backward()
    own = Way(WAYS[way], options)
    before = counters["stats"]["unique_graphs"]
    begin = sum(os.times()[:4])
    own.train(1)
    return {"seconds": sum(os.times()[:4]) - begin, "graphs": counters["stats"]["unique_graphs"] - before}


def first_step_alone(way: str, folder: str) -> dict[str, float]:
    """The same in a process of its own, whose compiled code goes to a folder."""
    command = [sys.executable, *sys.argv, "--alone", way]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, way)}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # others outlive the step, uncounted
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {found}", file=sys.stderr, flush=True)
    return found


def time_rounds(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train both ways in turn. Returns the median CPU seconds of a step in each round."""
    ways = {name: Way(regional, options) for name, regional in WAYS.items()}
    for way in ways.values():
        way.train(4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            gc.collect()  # what the other left behind is not this one's
            seconds[name].append(median(ways[name].train(options.steps)))
    return seconds


def report(first: Mapping[str, Mapping[str, float]], steps: Mapping[str, Sequence[float]]) -> tuple[str, list[str]]:
    """The table, and what is not as it is to be."""
    rows, wrong = [], []
    usual = {name: median(steps[name]) if steps else 0.0 for name in first}
    compiling = {name: found["seconds"] - usual[name] for name, found in first.items()}
    ratios = [own / whole for own, whole in zip(steps["regional"], steps["whole"], strict=True)] if steps else []
    for name, found in first.items():
        share = compiling[name] / compiling["whole"]
        ratio = f"{median(ratios):.3f}" if ratios and name == "regional" else "1" if ratios else ""
        figures = f"{compiling[name]:.1f}", f"{share:.2f}", f"{usual[name] * 1e3:.1f}", ratio
        rows.append([name, f"{found['graphs']:.0f}", *figures])
    if first["regional"]["graphs"] != 1:
        wrong.append(f"regional compiled {first['regional']['graphs']:.0f} graphs, and not one")
    if steps and compiling["regional"] > COMPILE_SHARE * compiling["whole"]:
        wrong.append(f"regional took more than {COMPILE_SHARE} of the time of whole to compile")
    if ratios and median(ratios) > STEP_RATIO:
        wrong.append(f"a step of regional took more than {STEP_RATIO} times as long")
    header = ("compiled", "graphs", "seconds to compile", "of whole", "ms per step", "over whole, median")
    return table(header, rows), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", choices=("all", "count"), default="all")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384, help="features of a token, 64 for each head")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of each way in a round")
    parser.add_argument("--alone", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not KEEPS_MEMORY.items() <= os.environ.items():  # it is read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEPS_MEMORY})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*script_method.*")  # in torch's own compiler
    if options.alone:
        print(json.dumps(first_step(options.alone, options)))
        return 0
    if options.parts == "count":
        text, wrong = report({name: first_step(name, options) for name in WAYS}, {})
    else:
        with tempfile.TemporaryDirectory() as folder:
            first = {name: first_step_alone(name, folder) for name in WAYS}
            # Its code is there already; that of regional is compiled once more.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "whole")
            text, wrong = report(first, time_rounds(options))
    print(f"{machine()}\n\n{text}")
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
