"""The loss of the `bytes_gpt` recipe after some steps in bf16 and in FP8, on the same batches from the same weights.

    python benchmarks/fp8.py                              # 200 steps in bf16 and in each recipe of torchao
    python benchmarks/fp8.py --small                      # a model of 0.1M parameters, for a first look
    python benchmarks/fp8.py --recipes tensorwise --seeds 0 1 2

FP8 is emulated where the device has none. It fails where a recipe's loss is more than `--within` percent above bf16's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Any

from report import table

from loopwright import Callback, Trainer, set_seed
from loopwright.recipes.bytes_gpt.data import library_loaders
from loopwright.recipes.bytes_gpt.task import BytesGPT

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
SMALL = {"width": 64, "num_layers": 2, "num_heads": 2, "context": 64}
LAST = 20
"""Over so many steps at the end the training loss is averaged."""


class Losses(Callback):
    """The training loss of each step, in bits per byte."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        """Keep it."""
        if "train/bits_per_byte" in metrics:
            self.values.append(metrics["train/bits_per_byte"])


def train_all(precision: Any, options: argparse.Namespace) -> dict[str, float]:
    """The means over the seeds: early in a training one seed scatters more than the formats differ."""
    found = [train(precision, seed, options) for seed in options.seeds]
    return {kind: sum(each[kind] for each in found) / len(found) for kind in found[0]}


def train(precision: Any, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train so many steps from the seed's weights, and validate.

    Returns:
        The mean training loss of the last steps and the validation loss, in bits per byte, and the seconds it took.
    """
    set_seed(seed)
    sizes = SMALL if options.small else {}
    context, max_bytes = sizes.get("context", 128), 500_000 if options.small else 3_000_000
    data = library_loaders(batch_size=options.batch_size, context=context, max_bytes=max_bytes)
    task, losses = BytesGPT(total_steps=options.steps, **sizes), Losses()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=options.steps, precision=precision, seed=seed, trackers=False, progress=False,
            log_every=1, val_every="last", sanity_val_batches=0, limit_batches={"val": 20}, project_dir=folder,
            callbacks=losses,
        )  # fmt: skip
        trainer.fit(task, data["train"], data["val"])
    last = losses.values[-LAST:]
    return {
        "training": sum(last) / len(last),
        "validation": trainer.metrics["val/bits_per_byte"],
        "seconds": time.perf_counter() - begin,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--small", action="store_true", help=f"a model with {SMALL} on 500 kB of text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="over which losses are averaged")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="of torchao")
    parser.add_argument("--precisions", nargs="+", default=[], help="others beside them, such as no, which is fp32")
    parser.add_argument("--within", type=float, default=2.0, help="percent above bf16 that are accepted")
    options = parser.parse_args()
    fp8 = {f"fp8, {recipe}": {"name": "fp8", "recipe": recipe, "emulate": True} for recipe in options.recipes}
    found = {}
    others = {name: name for name in options.precisions}
    for name, precision in {"bf16": "bf16", **others, **fp8}.items():
        found[name] = train_all(precision, options)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    base = found["bf16"]
    rows = [
        [name, *(f"{f[kind]:.4f} ({100 * (f[kind] / base[kind] - 1):+.2f} %)" for kind in ("training", "validation")),
         f"{f['seconds']:.0f}"]
        for name, f in found.items()
    ]  # fmt: skip
    print(table(["precision", f"training loss, mean of {LAST} steps", "validation loss", "seconds"], rows))
    judged = [found[name] for name in fp8]
    above = max((100 * (f[kind] / base[kind] - 1) for f in judged for kind in ("training", "validation")), default=0.0)
    print(f"At most {above:+.2f} % above bf16, accepted are {options.within:+.2f} %.")
    return int(above > options.within)


if __name__ == "__main__":
    sys.exit(main())
