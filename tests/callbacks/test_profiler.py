"""`Profiler`: which steps are in the traces, and what is marked there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.profiler import Profiler
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer


class Net(Task):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.fails_at = fails_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise ValueError("broken batch")
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(5, 6)] * 12


def fit(profiler: Profiler, tmp_path: Path, task: Task | None = None, **options: Any) -> Trainer:
    trainer = Trainer(
        callbacks=[profiler], max_epochs=1, trackers=False, progress=False, project_dir=tmp_path, name="run", **options
    )
    trainer.fit(task or Net(), BATCHES)
    return trainer


def marks(path: Path) -> Counter[str]:
    """How often each mark of ours is in a trace, read as JSON."""
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    return Counter(name for name in names if name.startswith("loopwright."))


def test_each_cycle_has_its_trace(tmp_path: Path) -> None:
    fit(
        Profiler(skip_first=2, wait=1, warmup=1, active=2, repeat=2, rows=0, activities=["cpu"]), tmp_path, accumulate=1
    )
    folder = tmp_path / "run" / "profile"
    # Cycles of 4 steps from step 2 on: steps 5 and 6 are recorded, then 9 and 10.
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.10.pt.trace.json", "rank0.6.pt.trace.json"]
    for path in folder.iterdir():
        assert marks(path) == {"loopwright.training_step": 2, "loopwright.backward": 2, "loopwright.optimizer": 2}


def test_micro_batches_of_a_step_are_marked_one_by_one(tmp_path: Path) -> None:
    profiler = Profiler(skip_first=0, warmup=1, active=2, rows=0, folder=tmp_path / "traces", activities=["cpu"])
    fit(profiler, tmp_path, accumulate=3)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank0.3.pt.trace.json"
    assert marks(path) == {"loopwright.training_step": 6, "loopwright.backward": 6, "loopwright.optimizer": 2}


def test_flops_and_the_table_are_those_of_the_recorded_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Profiler(skip_first=0, warmup=1, active=3, with_flops=True, rows=50, activities=["cpu"]), tmp_path)
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    (forward,) = [line for line in lines if line and line[0] == "aten::addmm"]
    assert forward[-2] == "3"  # calls
    assert float(forward[-1]) == 3 * 2 * 5 * 6 * 2  # a multiplication and an addition for each


def test_a_training_without_a_whole_cycle_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Profiler(skip_first=100), tmp_path)
    assert "no cycle ended in the 12 steps of this training" in capsys.readouterr().err
    assert not (tmp_path / "run" / "profile").exists()


def test_an_exception_ends_the_recording(tmp_path: Path) -> None:
    profiler = Profiler(skip_first=0, warmup=1, active=50, rows=0, activities=["cpu"])
    with pytest.raises(ValueError, match="broken batch"):
        fit(profiler, tmp_path, Net(fails_at=4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as another:  # there is one at a time
        torch.ones(1).add(1)
    assert "aten::add" in {event.key for event in another.key_averages()}
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert marks(path)["loopwright.training_step"] == 4  # also what the cycle had until then


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0}, r"Profiler\(active=0\)"),
        ({"skip_first": -1}, r"Profiler\(skip_first=-1\)"),
        ({"rows": "ten"}, r"Profiler\(rows=.ten.\)"),
        ({"activities": ["gpu"]}, r"activities holds 'gpu'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profiler(**options)


def test_snapshots_need_cuda(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_snapshots=True.* this run is on cpu\. Leave it out"):
        fit(Profiler(memory_snapshots=True), tmp_path)


@pytest.mark.gpu
def test_memory_that_runs_out_leaves_its_history(tmp_path: Path) -> None:
    class Greedy(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                torch.empty(2**60, device=batch.device)
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError):
        fit(Profiler(memory_snapshots=True, rows=0), tmp_path, Greedy())
    assert (tmp_path / "run" / "profile" / "rank0.memory.pickle").stat().st_size > 0
