"""What a prepared loader costs over torch's DataLoader, with Accelerate's beside it, interleaved in one process.

    python benchmarks/loader.py [--quick] [--rounds 21]

Each round reads 20,000 small samples once through each loader, in an order that turns from round to round. The table
has the median CPU time (one thread, so that what else runs disturbs little), the median of the ratios to the raw loader
within a round, and the ratio of the quickest passes of all rounds. "torch, again" shows the noise.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from report import table
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 20_000


def raw(batch_size: int) -> DataLoader[Any]:
    """The loader itself: 8 numbers and a label for each sample."""
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 10, (SAMPLES,)))
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def loopwright(batch_size: int) -> Iterable[Any]:
    """Prepared by Loopwright's Accelerator."""
    from loopwright import Accelerator

    loader: Iterable[Any] = Accelerator(cpu=True).prepare(raw(batch_size))
    return loader


def accelerate(batch_size: int) -> Iterable[Any]:
    """Prepared by Hugging Face's Accelerator."""
    from accelerate import Accelerator

    loader: Iterable[Any] = Accelerator(cpu=True).prepare(raw(batch_size))
    return loader


def seconds(loader: Iterable[Any]) -> float:
    """The CPU time of one pass, without garbage collection."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    for _ in loader:
        pass
    took = time.process_time() - began
    gc.enable()
    return took


def measure(batch_size: int, rounds: int) -> list[tuple[str, str, str, str]]:
    """For each loader its name, its median time, its median ratio to the raw loader, and that of the quickest."""
    makers: dict[str, Callable[[int], Iterable[Any]]] = {"torch": raw, "torch, again": raw, "loopwright": loopwright}
    if find_spec("accelerate") is not None:
        makers["accelerate"] = accelerate
    loaders = {name: make(batch_size) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    names = list(loaders)
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            took = seconds(loaders[name])
            if index:  # the first round warms up
                times[name].append(took)
    rows = []
    for name in names:
        ratios = [own / base for own, base in zip(times[name], times["torch"], strict=True)]
        median, quickest = statistics.median(ratios), min(times[name]) / min(times["torch"])
        rows.append((name, f"{1000 * statistics.median(times[name]):.1f}", f"{median:.3f}", f"{quickest:.3f}"))
    return rows


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, for a look; the figures are noisy then")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for batch_size in (1, 8, 32):
        print(f"\n## {SAMPLES} samples in batches of {batch_size}\n")
        print(
            table(
                ("loader", "median CPU ms", "ratio to torch", "of the quickest"),
                measure(batch_size, 3 if arguments.quick else arguments.rounds),
            )
        )


if __name__ == "__main__":
    main()
