"""Kills a training at random moments, again and again, and looks whether anything was lost.

A training that saves after every step is killed by SIGKILL, resumed by `resume_from="latest"` in a new process, killed
again, until a leg comes to its end by itself: then its weights, optimizer, random states, order of samples and tracker
rows are compared with those of a training that was never stopped. Runs follow each other until enough kills have hit,
with synchronous and asynchronous saves, in one process and in two, of which one is killed or both.

    python benchmarks/soak.py --kills 200

Prints a line for each kind of run and exits with 1 where a committed step was lost or an end was not equal.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from loopwright import Callback, ModelCheckpoint, Task, Trainer
from loopwright.distributed.ports import free_port
from loopwright.distributed.random import random_tree, set_seed

STEPS = 24
NOTICE_SECONDS = 0.5
"""How long the process that is left has until it is killed as well, as a launcher would."""
LEG_SECONDS = 120.0
_NUMBERS = struct.Struct("<3q")


class Samples(Dataset[Any]):
    """Samples with noise of their own."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, torch.arange(8.0) * index / 40 + torch.randn(8) + random.random(), index % 3


class Net(Task):
    """A small model with dropout, which logs each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, values, labels = batch
        loss = nn.functional.cross_entropy(self.net(values), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, values, labels = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(values), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass(frozen=True)
class Kind:
    """One kind of run."""

    name: str
    num_processes: int = 1
    asynchronous: bool = False
    kills_all: bool = True


KINDS = (
    Kind("1 process, synchronous saves"),
    Kind("1 process, asynchronous saves", asynchronous=True),
    Kind("2 processes, both killed", 2),
    Kind("2 processes, one killed", 2, kills_all=False),
    Kind("2 processes, asynchronous, one killed", 2, asynchronous=True, kills_all=False),
)


class Board:
    """Three numbers that the training and this program share: steps taken, steps committed, step resumed from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBERS.size)

    def write(self, **numbers: int) -> None:
        """Set some of them: `taken`, `committed`, `resumed`."""
        known = self.read() | numbers
        _NUMBERS.pack_into(self._memory, 0, known["taken"], known["committed"], known["resumed"])

    def read(self) -> dict[str, int]:
        """All of them."""
        return dict(zip(("taken", "committed", "resumed"), _NUMBERS.unpack_from(self._memory, 0), strict=True))


class Reporter(Callback):
    """Tells the board how far the training is, and keeps a digest of all samples in their order."""

    def __init__(self, board: Board) -> None:
        self.board, self.digest = board, ""

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.digest = state["digest"]

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        if trainer.process.is_main_process:
            self.board.write(resumed=trainer.state.step)

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        numbers, values, _ = batch
        own = hashlib.blake2b(self.digest.encode() + numbers.numpy().tobytes() + values.numpy().tobytes())
        self.digest = own.hexdigest()

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.process.is_main_process:
            self.board.write(taken=trainer.state.step)

    def on_saved(self, trainer: Any, task: Any, path: Path) -> None:
        if trainer.process.is_main_process:
            manifest = json.loads((path / "manifest.json").read_text())
            self.board.write(committed=manifest["progress"]["step"])


def train(kind: Kind, folder: Path, board: Board) -> None:
    """One leg, in a process of its own."""
    set_seed(3)
    task, reporter = Net(), Reporter(board)
    saver = ModelCheckpoint(every="1 step", top_k=2, asynchronous=kind.asynchronous)
    trainer = Trainer(
        max_steps=STEPS, callbacks=[saver, reporter], trackers="jsonl", progress=False, project_dir=folder, name="run",
        log_every="1 step", val_every="5 steps", sanity_val_batches=0,
    )  # fmt: skip
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    trainer.fit(task, loader, DataLoader(Samples(), batch_size=8), resume_from="latest")
    outcome = {
        "weights": task.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "random": random_tree(torch.device("cpu")),
    }
    rank = trainer.process.process_index
    if rank == 0:
        outcome["samples"] = reporter.digest  # whose state is that of the main process
    files = [name for name, module in sys.modules.items() if _is_file(name, module)]
    (folder / "modules.json").write_text(json.dumps(files))
    (folder / f"outcome-{rank}.json").write_text(json.dumps({name: digest_of(each) for name, each in outcome.items()}))


def _is_file(name: str, module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.has_location and spec.name == name


def digest_of(value: Any) -> str:
    """A text that is the same for values that are equal bit for bit."""
    return hashlib.blake2b(repr(plain(value)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Tensors as bytes, mappings as lists of pairs."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), plain(each)) for key, each in value.items()]
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def start(kind: Kind, folder: Path, board: Board, log: Path) -> list[int]:
    """Fork the processes of a leg; returns their ids."""
    port = free_port() if kind.num_processes > 1 else 0
    processes = []
    for rank in range(kind.num_processes):
        sys.stdout.flush()
        child = os.fork()
        if child:
            processes.append(child)
            continue
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if kind.num_processes > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in (place | meeting).items()})
            train(kind, folder, board)
            code = 0
        except BaseException:  # noqa: BLE001 - told in the log; a child must not come back into this program
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return processes


def outcome_of(kind: Kind, folder: Path) -> dict[str, Any]:
    """What a run has left behind."""
    rows = (folder / "run" / "metrics.jsonl").read_text()
    parts = {str(rank): json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(kind.num_processes)}
    return parts | {"rows": rows}


@dataclass
class Figures:
    """What came of the runs of one kind."""

    kills: int = 0
    resumed: int = 0
    runs: int = 0
    equal: int = 0
    lost: list[int] = field(default_factory=list)
    """Steps behind the last commit that were trained again, for each kill."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        mean = sum(self.lost) / max(len(self.lost), 1)
        return (
            f"{self.kills} kills, {self.resumed} resumed; steps lost after the last commit {mean:.2f} on average, "
            f"{max(self.lost, default=0)} at most; bit-equal at the end {self.equal} of {self.runs} runs"
        )


def wait(processes: list[int], seconds: float) -> dict[int, int]:
    """The exit codes of those that end in time, by their ids."""
    deadline, ended = time.monotonic() + seconds, dict[int, int]()
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for each in processes:
            if each not in ended:
                found, status = os.waitpid(each, os.WNOHANG)
                if found:
                    ended[each] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return ended


def kill(processes: list[int]) -> None:
    """End them at once, and wait for that."""
    for each in processes:
        os.kill(each, signal.SIGKILL)
    for each in processes:
        os.waitpid(each, 0)


def leg(kind: Kind, folder: Path, board: Board, moment: float | None, choices: random.Random) -> bool:
    """One leg; returns whether it came to its end before it was to be killed."""
    processes = start(kind, folder, board, folder / "log.txt")
    ended = wait(processes, LEG_SECONDS if moment is None else moment)
    left = [each for each in processes if each not in ended]
    if not left or any(ended.values()):
        kill(left)
        if any(ended.values()):
            raise RuntimeError(f"a leg failed by itself:\n{(folder / 'log.txt').read_text()[-3000:]}")
        return True
    if moment is None:
        kill(left)
        raise RuntimeError(f"a leg hangs:\n{(folder / 'log.txt').read_text()[-3000:]}")
    first = left if kind.kills_all else [choices.choice(left)]
    kill(first)
    others = [each for each in left if each not in first]
    late = wait(others, NOTICE_SECONDS)
    kill([each for each in others if each not in late])
    return False


def import_all(names: list[str]) -> None:
    """Import here what a leg has needed, so that none of the next ones has to."""
    for name in names:
        if name not in sys.modules:
            importlib.import_module(name)


def soak(kind: Kind, folder: Path, num_kills: int, choices: random.Random) -> Figures:
    """Runs of one kind until so many kills have hit."""
    figures, board = Figures(), Board()
    whole = folder / "whole"
    whole.mkdir(parents=True)
    for _ in range(2):  # the second knows all that is imported, and tells how long a leg takes
        shutil.rmtree(whole)
        whole.mkdir()
        began = time.monotonic()
        leg(kind, whole, board, None, choices)
        seconds = time.monotonic() - began
        import_all(json.loads((whole / "modules.json").read_text()))
    expected = outcome_of(kind, whole)
    while figures.kills < num_kills:
        one = folder / str(figures.runs)
        one.mkdir()
        run_of(kind, one, board, seconds, min(num_kills - figures.kills, 12), figures, choices)
        found = outcome_of(kind, one)
        figures.runs += 1
        unequal = [name for name in expected if expected[name] != found[name]]
        figures.equal += not unequal
        figures.problems += [f"{one}: {', '.join(unequal)} differ"] if unequal else []
        if not unequal:
            shutil.rmtree(one)
    return figures


def run_of(
    kind: Kind, folder: Path, board: Board, seconds: float, most: int, figures: Figures, choices: random.Random
) -> None:
    """One run from its first leg to its end."""
    board.write(taken=0, committed=0, resumed=0)
    num_kills, before = 0, None
    while True:
        moment = choices.uniform(0.02, seconds) if num_kills < most else None
        board.write(resumed=-1)
        is_over = leg(kind, folder, board, moment, choices)
        now = board.read()
        if before is not None and now["resumed"] >= 0:  # else it was killed before it had found out
            figures.resumed += before["kills"]
            figures.lost += [max(0, before["taken"] - now["resumed"])]
            if now["resumed"] < before["committed"]:
                figures.problems.append(f"{folder}: step {before['committed']} was committed, and is lost")
            before = None
        if is_over:
            return
        num_kills += 1
        figures.kills += 1
        pending = 0 if before is None else before["kills"]
        before = {"taken": now["taken"], "committed": now["committed"], "kills": pending + 1}


def main() -> int:
    """Run all kinds and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200, help="over all kinds of runs")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that this process has no other thread when it forks
    warnings.simplefilter("ignore")
    total, choices = Figures(), random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    for number, kind in enumerate(KINDS):
        share = options.kills // len(KINDS) + (number < options.kills % len(KINDS))
        if not share:
            continue
        figures = soak(kind, folder / str(number), share, choices)
        print(f"{kind.name}: {figures}", flush=True)
        for name in ("kills", "resumed", "runs", "equal", "lost", "problems"):
            setattr(total, name, getattr(total, name) + getattr(figures, name))
    print(f"all: {total}")
    for problem in total.problems:
        print(problem)
    if not total.problems:
        shutil.rmtree(folder)
    return int(bool(total.problems) or total.resumed != total.kills)


if __name__ == "__main__":
    raise SystemExit(main())
