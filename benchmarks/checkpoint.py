"""What saving and loading a checkpoint costs beside safetensors and torch, interleaved in one process.

    python benchmarks/checkpoint.py [--quick] [--rounds 9] [--parts save load held] [--folder DIR] [--threads 2]

A model of 50M parameters with AdamW's two moments: 604 MB. Every save ends with the bytes on the disk. Each round
does everything once; the tables have medians, the median of the ratios within a round, the ratio of the quickest, and
of saving and loading the largest growth of the process's memory, in MB. "again" shows the noise.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.reading import Checkpoint, open_checkpoint
from loopwright.checkpoint.saving import PendingSave, save_checkpoint, start_saving

State = dict[str, Tensor]
Rows = dict[str, list[tuple[float, float]]]
"""For each name what it took in each round: seconds, and bytes of memory."""


class Training:
    """A model and an optimizer's state, with numbers in them."""

    def __init__(self, num_layers: int) -> None:
        layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(num_layers)]
        self.model = nn.Sequential(nn.Embedding(24_000, 512), *layers)
        weights = list(self.model.parameters())
        self.optimizer = {
            "state": {
                index: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(w), "exp_avg_sq": torch.randn_like(w)}
                for index, w in enumerate(weights)
            }
        }

    def contents(self) -> Contents:
        """What a checkpoint of it has."""
        return Contents(
            trees={"state": {"step": 1}, "optimizer": self.optimizer}, weights={"model": self.model.state_dict()}
        )

    def tensors(self) -> State:
        """All tensors by name."""
        state = {name: value.detach() for name, value in self.model.state_dict().items()}
        for index, moments in self.optimizer["state"].items():
            state |= {f"{index}.{name}": value for name, value in moments.items()}
        return state


def peak_growth(act: Callable[[], object]) -> tuple[float, float]:
    """The seconds of a call, and by how many bytes the resident memory grew at most."""
    done, peak = threading.Event(), [0]
    gc.collect()
    before = _resident()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    act()
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    return took, float(peak[0])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def save_plain(training: Training, path: Path) -> None:
    """The writer of safetensors, and fsync."""
    save_file(training.tensors(), path)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def warm_the_page_cache(training: Training, path: Path) -> None:
    """Write as much and remove it: memory that was free for long is slow to get, on virtual machines above all."""
    save_plain(training, path)
    path.unlink()
    os.sync()


def save_torch(training: Training, path: Path) -> None:
    """torch.save, and fsync."""
    with path.open("wb") as file:
        torch.save(training.tensors(), file)
        file.flush()
        os.fsync(file.fileno())


def load_plain(path: Path, targets: State) -> None:
    """The reader of safetensors, copied into existing tensors."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (no mapping)
            targets[name].copy_(file.get_tensor(name))


def load_own(checkpoint: Checkpoint, training: Training) -> None:
    """A checkpoint into the existing model and optimizer state."""
    checkpoint.load_weights_into(training.model)
    checkpoint.tree("optimizer", into=training.optimizer)


def copy_all(state: State, copies: State) -> None:
    """A plain copy of all tensors into memory that is there."""
    for name, value in state.items():
        copies[name].copy_(value)


def begin_save(path: Path, training: Training, previous: PendingSave | None, started: list[PendingSave]) -> None:
    """Begin a save in the background; training goes on when this returns."""
    started.append(start_saving(path, training.contents(), Facts(), previous=previous))


def measure_saves(training: Training, folder: Path, rounds: int) -> Rows:
    """What each way to save took in each round. Afterwards a checkpoint and a plain file are there."""
    rows: Rows = {}
    plain, pickled, own = (folder / name for name in ("plain", "pickled", "own"))
    acts: list[tuple[str, Callable[[], object]]] = [
        ("safetensors + fsync", lambda: save_plain(training, plain)),
        ("loopwright", lambda: save_checkpoint(own, training.contents(), Facts())),
        ("safetensors + fsync, again", lambda: save_plain(training, plain)),
        ("torch.save + fsync", lambda: save_torch(training, pickled)),
    ]
    for index in range(rounds + 1):
        for name, act in acts[index % 4 :] + acts[: index % 4]:
            for path in (plain, pickled):
                path.unlink(missing_ok=True)
            if name == "loopwright":
                shutil.rmtree(own, ignore_errors=True)
            warm_the_page_cache(training, folder / "warm")
            rows.setdefault(name, []).append(peak_growth(act))
    return rows


def measure_loads(training: Training, folder: Path, rounds: int) -> Rows:
    """What each way to load took in each round."""
    rows: Rows = {}
    plain, own, targets = folder / "plain", folder / "own", training.tensors()
    save_plain(training, plain)
    shutil.rmtree(own, ignore_errors=True)
    save_checkpoint(own, training.contents(), Facts())
    checkpoint = open_checkpoint(own, verify="sizes")
    acts: list[tuple[str, Callable[[], object]]] = [
        ("safetensors", lambda: load_plain(plain, targets)),
        ("loopwright", lambda: load_own(checkpoint, training)),
        ("safetensors, again", lambda: load_plain(plain, targets)),
        ("verifying all", lambda: open_checkpoint(own)),
    ]
    for _ in range(rounds + 1):
        for name, act in acts:
            rows.setdefault(name, []).append(peak_growth(act))
    return rows


def measure_holds(training: Training, folder: Path, rounds: int) -> Rows:
    """What training waits for in each round. No memory is watched: that would keep the interpreter busy, which a
    training does not.
    """
    rows: Rows = {}
    targets, copies = training.tensors(), {name: value.clone() for name, value in training.tensors().items()}
    pending: PendingSave | None = None
    names = ("plain copy", "loopwright, in the background", "plain copy, again")
    for index in range(rounds + 1):
        for name in names[index % 3 :] + names[: index % 3]:
            shutil.rmtree(folder / "background", ignore_errors=True)
            os.sync()  # what was written or removed before does not go on beside the copies
            copy_all(targets, copies)
            started: list[PendingSave] = []
            act = functools.partial(copy_all, targets, copies)
            if not name.startswith("plain"):
                act = functools.partial(begin_save, folder / "background", training, pending, started)
            gc.collect()
            began = time.perf_counter()
            act()
            rows.setdefault(name, []).append((time.perf_counter() - began, math.nan))
            for pending in started:
                pending.wait()
    return rows


PARTS: dict[str, Callable[[Training, Path, int], Rows]] = {
    "save": measure_saves,
    "load": measure_loads,
    "held": measure_holds,
}


def report(title: str, rows: Rows) -> str:
    """A table; the first name is what the others are compared with. The first round, which warms up, is left out."""
    base = [seconds for seconds, _ in next(iter(rows.values()))[1:]]
    lines = []
    for name, measured in rows.items():
        seconds = [took for took, _ in measured[1:]]
        ratio = statistics.median(own / other for own, other in zip(seconds, base, strict=True))
        memory = max(grown for _, grown in measured[1:]) / 1e6
        quickest = min(seconds) / min(base)
        shown = [] if math.isnan(memory) else [f"{memory:.0f}"]
        lines.append((name, f"{statistics.median(seconds):.3f}", f"{ratio:.2f}", f"{quickest:.2f}", *shown))
    header = (title, "median s", "ratio", "of the quickest", "extra MB")
    return table(header[: len(lines[0])], lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and 2 rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="the tables that are printed")
    parser.add_argument("--folder", type=Path, help="where to write; by default the folder for temporary files")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, which copy tensors")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(1 if arguments.quick else 12)
    size = sum(value.numel() * value.element_size() for value in training.tensors().values())
    print(f"{size / 1e6:.0f} MB in {len(training.tensors())} tensors, torch {torch.__version__}\n")
    rounds = 2 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for part in arguments.parts:
            print(report(part, PARTS[part](training, Path(folder), rounds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
