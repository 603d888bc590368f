"""One leg of a run that `loopwright verify-resume` looks at, in a process of its own.

It trains from the beginning or from a checkpoint until it is stopped, writes down each batch that it sees, and leaves a
checkpoint of where it stopped or of the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor

from ..callbacks.callback import StopRun
from ..callbacks.checkpoint import ModelCheckpoint
from ..trainer.task import Task
from ..trainer.trainer import Trainer
from .classes import python_path
from .config import RunConfig
from .loaders import loader_of
from .sources import Sources

StopKind = Literal["stop", "validation", "kill"]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What one leg is to do. Written to a file as JSON."""

    file: str
    """The run's YAML file."""
    flags: list[list[str]]
    """Keys of the file that are set, with their texts."""
    steps: int
    """Optimizer steps after which the run ends."""
    folder: str
    """That of the run, over all its legs."""
    name: str
    """Of this leg: its checkpoint, and the file of its batches."""
    resume_from: str | None = None
    stop: StopKind | None = None
    """How it ends before that: in order at a step boundary, inside a validation, or killed behind a checkpoint."""
    stop_at: int = 0
    """After how many micro-batches of the run."""

    @property
    def checkpoint(self) -> Path:
        """What it leaves."""
        return Path(self.folder) / self.name

    @property
    def batches(self) -> Path:
        """The file with a line for each batch and for each validation."""
        return Path(self.folder) / f"{self.name}.batches.jsonl"

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Leg:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Witness:
    """Writes down what a leg sees, and ends it where it is to end.

    Args:
        leg: which one.
        file: takes the lines.
    """

    def __init__(self, leg: Leg, file: TextIO) -> None:
        self.leg = leg
        self._file = file
        self._has_stopped = False

    def attach(self, trainer: Trainer) -> None:
        """Have its methods called at the trainer's events."""
        for event in ("batch_start", "batch_end", "validation_start", "validation_batch_end", "stop"):
            trainer.on(event, getattr(self, event))

    def batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """A line with the digest of the batch."""
        state = trainer.state
        self._say(micro_step=state.micro_step, epoch=state.epoch, batch=batch_idx, digest=digest_of(batch))

    def batch_end(self, trainer: Trainer, task: Task, outputs: Any) -> None:
        """Ask for the end, or for the checkpoint behind which the process is killed."""
        if self.leg.stop not in ("stop", "kill") or trainer.state.micro_step < self.leg.stop_at:
            return
        if self.leg.checkpoint.exists():
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._has_stopped:
            return
        self._has_stopped = True
        if self.leg.stop == "stop":
            trainer.stop("verify-resume: the leg ends here")
        else:
            trainer.save_state(self.leg.checkpoint, asynchronous=False)

    def validation_start(self, trainer: Trainer, task: Task) -> None:
        """A line that says where one is."""
        self._say(validated_at=trainer.state.micro_step)

    def validation_batch_end(self, trainer: Trainer, task: Task, outputs: Any) -> None:
        """Leave the validation in which the leg is to end."""
        if self.leg.stop == "validation" and trainer.state.micro_step >= self.leg.stop_at and not self._has_stopped:
            self._has_stopped = True
            raise StopRun("verify-resume: the leg ends in this validation")

    def stop(self, trainer: Trainer, task: Task) -> None:
        """Keep where the leg ends."""
        if self.leg.stop in ("stop", "validation"):
            trainer.save_state(self.leg.checkpoint, asynchronous=False)

    def _say(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")


def digest_of(value: Any) -> str:
    """A short text that is the same for batches that are equal bit for bit."""
    digest = blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        dense = value.detach().cpu().contiguous()
        digest.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        digest.update(dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b"")
    elif isinstance(value, dict):
        for key, each in value.items():
            digest.update(f"{key!r}:".encode())
            _feed(digest, each)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for each in value:
            _feed(digest, each)
    else:
        digest.update(repr(value).encode())


def run_leg(leg: Leg) -> None:
    """Train a leg to its end."""
    flags = [(key, text) for key, text in leg.flags]
    sources = Sources.read(Path(leg.file), flags, os.environ)
    with python_path(sources.folders), leg.batches.open("w", encoding="utf-8") as file:
        config = RunConfig(sources).parse()
        task, data, trainer = config.build(
            max_steps=leg.steps, devices=1, trackers="jsonl", progress=False, project_dir=leg.folder, name="run"
        )
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.directory = None  # its folder is not to be written to
        Witness(leg, file).attach(trainer)
        train, val = loader_of(data, "train"), loader_of(data, "val", is_required=False)
        trainer.fit(task, train, val, resume_from=leg.resume_from)
        if not leg.checkpoint.exists():
            trainer.save_state(leg.checkpoint)


if __name__ == "__main__":
    run_leg(Leg.read(Path(sys.argv[1])))
