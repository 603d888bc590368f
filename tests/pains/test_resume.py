"""Pains 7 to 10, 27, 35 and 40: the right batches, random states, another size, validation, rows, and no pickle."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.trackers.memory import MemoryTracker

from ..trainer.resuming import Setting, Stop, Story, differences
from ..trainer.tiny import Scalar, Watch, ones, trainer


@pytest.fixture(autouse=True)
def handler_of_torch() -> Iterator[None]:
    """Torch watches its workers by SIGCHLD, from the first loader that has some until the process ends."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("accumulate", "stops"),
    [(1, [Stop("stop", 4)]), (1, [Stop("stop", 2), Stop("stop", 5)]), (3, [Stop("stop", 4)])],
    ids=["once", "twice in an epoch", "in a window"],
)
def test_pain_7_the_right_batches(workers: int, accumulate: int, stops: list[Stop], tmp_path: Path) -> None:
    setting = Setting(workers=workers, accumulate=accumulate, samples=20, batch_size=2, max_epochs=2)
    expected = Story(setting, tmp_path / "whole").leg()
    found = Story(setting, tmp_path / "legs").through(stops)
    assert list(found.seen.values()) == list(expected.seen.values())
    assert sorted(number for batch in list(found.seen.values())[:10] for number in batch) == list(range(20))


@pytest.mark.parametrize("at", [4, 6], ids=["in an epoch", "at its edge"])
def test_pain_8_random_states_go_on(at: int, tmp_path: Path) -> None:
    expected = Story(Setting(), tmp_path / "whole").leg()
    found = Story(Setting(), tmp_path / "legs").through([Stop("stop", at)])
    assert differences(expected.weights, found.weights) == []
    assert differences(expected.random, found.random) == []


class Sees(Scalar):
    """Writes down the numbers of its samples."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.tolist()
        return super().training_step(batch.float(), batch_idx)


def _sized_leg(batch_size: int, resume_from: str | None, save: str, at: int | None) -> list[int]:
    def look(trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.samples >= (at or 99) and not Path(save).exists():
            trainer.save_state(save)
            trainer.stop("the leg ends")

    seen: list[int] = []
    found = trainer(callbacks=Watch(batch_end=look), max_epochs=1)
    loader = DataLoader(list(range(20)), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the resumed run can't be equal")
        found.fit(Sees(seen), loader, resume_from=resume_from)
    return seen


def test_pain_9_another_batch_size_and_number_of_processes(two_processes: Any) -> None:
    torch.manual_seed(2)
    order = _sized_leg(1, None, "none", None)
    torch.manual_seed(2)
    first = _sized_leg(1, None, "first", 4)
    second = _sized_leg(2, "first", "second", 8)
    third = two_processes(_sized_leg, 2, "second", "none", None)
    assert first + second == order[:8]
    assert sorted(third[0] + third[1]) == sorted(order[8:])
    assert third[0][:2] + third[1][:2] == order[8:12]


def test_pain_10_the_next_validation_is_whole(tmp_path: Path) -> None:
    setting = Setting(val_every="4 steps", max_epochs=3)
    expected = Story(setting, tmp_path / "whole").leg()
    found = Story(setting, tmp_path / "legs").through([Stop("stop", 5)])
    rows = [[(step, row["val/loss"]) for step, row in each.records if "val/loss" in row] for each in (expected, found)]
    assert rows[0] == rows[1]
    epochs = [row["epoch"] for step, row in found.records if "loss_epoch" in row]
    assert epochs == [1.0, 2.0, 3.0]


def test_pain_27_one_row_for_each_step_after_a_resume(tmp_path: Path) -> None:
    class Logged(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.w, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    class SavesAt(Callback):
        def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
            if trainer.state.step == 3 and trainer.resumed_step is None:
                trainer.save_state(tmp_path / "saved")

    memory = MemoryTracker()
    for resume_from in (None, tmp_path / "saved"):  # the first leg goes on to step 7, behind what is resumed from
        trainer(
            max_steps=7 if resume_from is None else 12, max_epochs=2, callbacks=SavesAt(), trackers=memory, log_every=1,
            val_every="2 steps", project_dir=tmp_path, name="run",
        ).fit(Logged(), ones(6), ones(2), resume_from=resume_from)  # fmt: skip
    (run,) = memory.runs
    steps = [step for step, _ in run.records]
    assert steps == sorted(steps)
    assert [step for step, _ in run.series("loss_step")] == list(range(1, 13))
    assert [step for step, _ in run.series("val")] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in run.series("loss_epoch")] == [6, 12]
    assert [run_epoch for step, run_epoch in run.series("epoch") if step in (6, 12)][-1] == 2.0


def test_pain_35_bare_torch_and_safetensors_read_a_checkpoint(tmp_path: Path) -> None:
    story = Story(Setting(max_epochs=1), tmp_path)
    story.leg(Stop("stop", 4))
    path = story.path_of(Stop("stop", 4))
    reader = (
        "import sys, json, pathlib\n"
        "from safetensors.torch import load_file\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "weights = load_file(folder / 'model.safetensors')\n"
        "values = json.loads((folder / 'state.json').read_text())\n"
        "print(sorted(weights)[0], 'loopwright' in sys.modules, type(values).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", reader, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["net.0.bias", "False", "dict"]
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_pain_40_nothing_is_saved_inside_a_window(tmp_path: Path) -> None:
    setting = Setting(accumulate=3)
    story = Story(setting, tmp_path / "legs")
    story.leg(Stop("save", 2))
    assert open_checkpoint(story.path_of(Stop("save", 2))).manifest.progress["micro_step"] == 3
    expected = Story(setting, tmp_path / "whole").leg()
    assert differences(expected, story.leg(None, story.path_of(Stop("save", 2)))) == []
