"""What the tests of resuming share: a training that draws random numbers wherever one can, and its legs, compared."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, Dataset

from loopwright.callbacks.callback import Callback, StopRun
from loopwright.distributed.random import random_tree, set_seed
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

CPU = torch.device("cpu")


class Samples(Dataset[Any]):
    """Samples that say their number; with noise of all three generators that users draw from."""

    def __init__(self, count: int = 22, augments: bool = True) -> None:
        self.count, self.augments = count, augments

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        values = torch.arange(4.0) * (index + 1) / 40
        if self.augments:
            values = values + 0.1 * torch.randn(4) + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return index, values, index % 3


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: {
        "scheduler": rates.LambdaLR(optimizer, lambda count: 0.9**count), "interval": "step"
    },
    "one cycle": lambda optimizer: {
        "scheduler": rates.OneCycleLR(optimizer, 0.1, total_steps=60), "interval": "step"
    },
    "cosine": lambda optimizer: {"scheduler": rates.CosineAnnealingLR(optimizer, 3), "interval": "epoch"},
    "plateau": lambda optimizer: {
        "scheduler": rates.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val/loss", "interval": "epoch"
    },
    "sequence": lambda optimizer: {
        "scheduler": rates.SequentialLR(
            optimizer, [rates.LinearLR(optimizer, 0.1, total_iters=3), rates.ExponentialLR(optimizer, 0.9)], [3]
        ),
        "interval": "step",
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training."""

    shuffle: bool = True
    workers: int = 0
    augments: bool = True
    accumulate: int = 1
    remainder: Any = "flush"
    precision: str = "no"
    dropout: bool = True
    schedule: str = "none"
    val_every: Any = "2 steps"
    max_epochs: int | None = 2
    max_steps: int | None = None
    batch_size: int = 4
    samples: int = 22
    make_loader: Callable[[], Any] | None = None


class Net(Task):
    """Logs in every way, draws in training and in validation, and knows which samples it saw."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.schedule = setting.schedule
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3 if setting.dropout else 0.0), nn.ReLU(), nn.Linear(8, 3)
        )
        self.seen: dict[int, list[int]] = {}
        self.num_validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, values, labels = batch
        self.seen[self.trainer.state.micro_step] = numbers.tolist()
        loss = F.cross_entropy(self.net(values), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", values.sum(), on_step=False, on_epoch=True, reduce="sum")
        self.log("noise", random.random() + float(np.random.rand()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        numbers, values, labels = batch
        self.num_validated += len(numbers)
        self.log("val/loss", F.cross_entropy(self.net(values), labels) + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = SCHEDULES[self.schedule](optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}


@dataclass(frozen=True)
class Stop:
    """Where a leg ends, and how.

    `"stop"`: `trainer.stop` after that micro-batch, and a checkpoint when the run ends. `"save"`: a checkpoint is asked
    for after that micro-batch, and the leg dies two later. `"validation"`: `StopRun` in the first validation behind it.
    `"start"`: `trainer.stop` before the first epoch, and a checkpoint when the run ends.
    """

    kind: str
    micro_step: int


class Died(Exception):  # noqa: N818 - it stands for no error
    """Stands in for a kill where a test has one process only."""


class Leaving(Callback):
    """Ends a leg at a `Stop`."""

    def __init__(self, stop: Stop | None, path: Path) -> None:
        self.stop, self.path, self.has_stopped = stop, path, False

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        if self.stop is not None and self.stop.kind == "start":
            trainer.stop("the leg ends before it began")

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        if self.stop is None:
            return
        behind = trainer.state.micro_step - self.stop.micro_step
        if self.stop.kind == "stop" and behind == 0:
            trainer.stop("the leg ends")
        elif self.stop.kind == "save" and behind == 0:
            trainer.save_state(self.path)
        elif self.stop.kind == "save" and behind >= 2 and self.path.exists():
            raise Died

    def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        if self.stop is not None and self.stop.kind == "validation":
            is_behind = trainer.state.micro_step >= self.stop.micro_step
            if is_behind and not self.has_stopped and trainer.state.stage == "validation":
                self.has_stopped = True
                raise StopRun("the leg ends in validation")

    def on_stop(self, trainer: Any, task: Any) -> None:
        if self.stop is not None and self.stop.kind != "save":
            trainer.save_state(self.path)


class Counting(Callback):
    """A callback with a state: how often a batch and an epoch ended, and the best validation."""

    def __init__(self) -> None:
        self.counts = {"batches": 0, "epochs": 0, "best": float("inf")}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state)

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        self.counts["batches"] += 1

    def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        if "val/loss" in metrics:  # a validation that was cut short has none
            self.counts["best"] = min(self.counts["best"], metrics["val/loss"])

    def on_epoch_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.counts["epochs"] += trainer.state.epoch_ended


@dataclass
class Outcome:
    """All that a training leaves behind."""

    weights: dict[str, Any]
    optimizers: list[Any]
    schedules: list[Any]
    counters: dict[str, int]
    metrics: dict[str, float]
    random: dict[str, Any]
    callback: dict[str, Any]
    scaler: dict[str, Any]
    seen: dict[int, list[int]]
    records: list[Any] = field(default_factory=list)


@dataclass
class Story:
    """The legs of one run."""

    setting: Setting
    folder: Path
    tracker: MemoryTracker = field(default_factory=MemoryTracker)
    seen: dict[int, list[int]] = field(default_factory=dict)
    num_legs: int = 0

    def leg(self, stop: Stop | None = None, resume_from: Path | None = None, **changes: Any) -> Outcome:
        """Train until the stop, or to the end. `changes` are of the setting."""
        setting = replace(self.setting, **changes)
        set_seed(3 if self.num_legs == 0 else 100 + self.num_legs)  # what comes later may not depend on it
        self.num_legs += 1
        task, counting = Net(setting), Counting()
        trainer = trainer_of(setting, self.folder, self.tracker, [counting, Leaving(stop, self.path_of(stop))])
        make = setting.make_loader or (lambda: loader_of(setting))
        validation = DataLoader(Samples(10), batch_size=4)
        try:
            trainer.fit(task, make(), validation, resume_from=resume_from)
        except Died as died:
            assert stop is not None and stop.kind == "save"
            traceback.clear_frames(died.__traceback__)  # which hold the loader, and that its workers
        self.seen.update(task.seen)
        records = self.tracker.runs[-1].records if self.tracker.runs else []
        return outcome_of(trainer, task, counting, dict(sorted(self.seen.items())), records)

    def path_of(self, stop: Stop | None) -> Path:
        """The checkpoint of a stop."""
        return self.folder / "none" if stop is None else self.folder / f"{stop.kind}-{stop.micro_step}"

    def through(self, stops: Sequence[Stop]) -> Outcome:
        """One leg for each stop, and the last to the end."""
        path = None
        for stop in stops:
            self.leg(stop, path)
            path = self.path_of(stop)
        return self.leg(None, path)


def trainer_of(setting: Setting, folder: Path, tracker: MemoryTracker, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        max_epochs=setting.max_epochs,
        max_steps=setting.max_steps,
        accumulate=setting.accumulate,
        accumulate_across_epochs=setting.remainder,
        precision=setting.precision,
        val_every=setting.val_every,
        log_every="1 step",
        sanity_val_batches=1,
        callbacks=callbacks,
        trackers=tracker,
        progress=False,
        project_dir=folder,
        name="run",
    )


def loader_of(setting: Setting) -> Any:
    return DataLoader(
        Samples(setting.samples, setting.augments),
        batch_size=setting.batch_size,
        shuffle=setting.shuffle,
        num_workers=setting.workers,
    )


def outcome_of(trainer: Trainer, task: Net, counting: Counting, seen: Any, records: Any) -> Outcome:
    return Outcome(
        weights={name: value.clone() for name, value in task.state_dict().items()},
        optimizers=[each.state_dict() for each in trainer.optimizers],
        schedules=[_plain(each.state_dict()) for each in trainer.schedulers],
        counters=trainer.state.counters(),
        metrics=dict(trainer.metrics),
        random=random_tree(CPU),
        callback=counting.state_dict(),
        scaler=dict(trainer.strategy.precision.state_dict()),
        seen=seen,
        records=list(records),
    )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not callable(value) and name != "_schedulers"}


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two values are not equal bit for bit, with their paths."""
    if isinstance(expected, Outcome):
        return [line for name in vars(expected) for line in differences(vars(expected)[name], vars(found)[name], name)]
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and expected.dtype == found.dtype and torch.equal(expected, found)
        return [] if same else [f"{path}: {expected} became {found}"]
    if type(expected) is not type(found):
        return [f"{path}: {expected!r} became {found!r}"]
    if isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *found])
        pairs = [(expected.get(key, "absent"), found.get(key, "absent"), f"{path}.{key}") for key in keys]
        return [line for pair in pairs for line in differences(*pair)]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return [f"{path}: {len(expected)} items became {len(found)}: {expected} became {found}"]
        parts = enumerate(zip(expected, found, strict=True))
        return [line for index, (one, other) in parts for line in differences(one, other, f"{path}[{index}]")]
    is_equal = expected == found or (expected != expected and found != found)
    return [] if is_equal else [f"{path}: {expected!r} became {found!r}"]
