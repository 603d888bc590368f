"""`ModelCheckpoint(save_weights_only=True)` in real fits: the weight in a file is minus the number of its step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from loopwright import Callback, MetricError, ModelCheckpoint
from loopwright.callbacks.kept_checkpoints import KeptCheckpoints, SavedCheckpoint
from loopwright.distributed.atomic import remove_folder

from ..nursery import nursery
from .counting import EVERY, batches, files, fit

Files = partial(ModelCheckpoint, save_weights_only=True)


def test_last_is_written_after_each_epoch_and_at_the_end(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Look(Callback):
        def on_epoch_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            seen.append(files(tmp_path / "runs/run/checkpoints"))

    checkpoint = Files()
    fit(checkpoint, train=batches(3), max_epochs=2.5, callbacks=[Look()])
    assert seen == [{"last.safetensors": -3.0}, {"last.safetensors": -6.0}, {"last.safetensors": -6.0}]
    # max_epochs=2.5 of 3 batches: the first step boundary at or after 7.5 batches
    assert files(tmp_path / "runs/run/checkpoints") == {"last.safetensors": -8.0}
    assert checkpoint.last_path == tmp_path / "runs/run/checkpoints/last.safetensors"
    assert checkpoint.best_path is None


def test_loader_without_length_is_saved_at_each_epochs_end(tmp_path: Path) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(batches(2))

    checkpoint = Files(top_k=-1, directory=tmp_path / "out", last=False)
    fit(checkpoint, train=Endless(), max_epochs=2)
    assert files(tmp_path / "out") == {"step=2.safetensors": -2.0, "step=4.safetensors": -4.0}


@pytest.mark.parametrize(("every", "accumulate", "steps"), EVERY)
def test_every_is_read_in_the_one_grammar(tmp_path: Path, every: Any, accumulate: int, steps: list[int]) -> None:
    checkpoint = Files(every, top_k=-1, last=False, directory=tmp_path / "out")
    fit(checkpoint, train=batches(6), accumulate=accumulate)
    assert files(tmp_path / "out") == {f"step={step}.safetensors": -float(step) for step in steps}


def test_best_and_last(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", directory=tmp_path / "out")
    trainer = fit(checkpoint, [3.0, 1.0, 2.0])
    assert files(tmp_path / "out") == {"best.safetensors": -2.0, "last.safetensors": -3.0}
    assert checkpoint.best_path == tmp_path / "out" / "best.safetensors"
    assert checkpoint.best_score == 1.0
    assert trainer.state.step == 3


def test_b32_newest_files_are_kept_by_number_not_by_text(tmp_path: Path) -> None:
    checkpoint = Files(1, top_k=3, last=False, directory=tmp_path / "out")
    fit(checkpoint, train=batches(11))
    assert files(tmp_path / "out").keys() == {"step=9.safetensors", "step=10.safetensors", "step=11.safetensors"}
    kept = KeptCheckpoints(2, None)
    for step in (99, 100, 9900, 10000):
        kept.add(SavedCheckpoint(Path(f"step={step}"), step, None))
    assert [file.step for file in kept.ranked] == [10000, 9900]


def test_b34_nan_is_never_best_and_any_finite_value_replaces_it(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", directory=tmp_path / "out", last=False)
    fit(checkpoint, [math.nan, 0.5, math.nan, 0.4, 0.6])
    assert checkpoint.best_score == 0.4
    assert files(tmp_path / "out") == {"best.safetensors": -4.0}
    both = Files(monitor="val/loss", top_k=-1, directory=tmp_path / "all", last=False)
    fit(both, [math.nan, math.inf, -math.inf, 0.6])
    assert both.best_score == 0.6
    assert len(files(tmp_path / "all")) == 4


def test_b35_slash_in_a_metrics_name_makes_no_folder(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", directory=tmp_path / "out", last=False, filename="{epoch}-{val/loss:.2f}")
    fit(checkpoint, [0.3, 0.2, 0.1])
    assert files(tmp_path / "out") == {"epoch=2-val_loss=0.10.safetensors": -3.0}


@pytest.mark.parametrize("top_k", [-1, 3])
def test_b103_best_path_is_right_when_several_are_kept(tmp_path: Path, top_k: int) -> None:
    checkpoint = Files(monitor="val/loss", mode="max", top_k=top_k, directory=tmp_path / "out", last=False)
    fit(checkpoint, [0.2, 0.9, 0.5, 0.7])
    assert checkpoint.best_score == 0.9
    assert checkpoint.best_path is not None
    assert load_file(checkpoint.best_path)["w"].item() == -2.0
    assert [file.score for file in checkpoint.kept] == [0.9, 0.7, 0.5] + [0.2] * (top_k == -1)
    assert len(files(tmp_path / "out")) == len(checkpoint.kept)


def test_of_equal_values_the_first_stays(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", top_k=2, directory=tmp_path / "out", last=False)
    fit(checkpoint, [0.5, 0.5, 0.5, 0.4, 0.4, 0.4])
    assert [(file.score, file.step) for file in checkpoint.kept] == [(0.4, 4), (0.4, 5)]
    assert files(tmp_path / "out") == {"step=4-val_loss=0.4.safetensors": -4.0, "step=5-val_loss=0.4.safetensors": -5.0}


def test_b101_files_of_another_run_are_neither_removed_nor_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("step=500", "step=7", "last"):
        (folder / f"{name}.safetensors").write_text("another run's")
    checkpoint = Files("7 steps", top_k=1, filename="{step}", directory=folder)
    with pytest.warns(UserWarning, match="is there already, and stays; this run writes '(step=7|last)-v2.safetensors'"):
        fit(checkpoint, train=batches(14))
    theirs = {name for name in os.listdir(folder) if (folder / name).read_bytes() == b"another run's"}
    assert theirs == {"step=500.safetensors", "step=7.safetensors", "last.safetensors"}
    assert set(os.listdir(folder)) - theirs == {"step=14.safetensors", "last-v2.safetensors"}
    assert load_file(folder / "last-v2.safetensors")["w"].item() == -14.0
    assert checkpoint.last_path == folder / "last-v2.safetensors"


def test_pain_17_a_score_belongs_to_the_step_that_reached_it(tmp_path: Path) -> None:
    checkpoint = Files("10 steps", monitor="val/loss", top_k=-1, directory=tmp_path / "out", last=False)
    fit(checkpoint, [3.0, 1.0, 2.0], train=batches(30), val_every="10 steps", max_epochs=1)
    by_step = sorted(checkpoint.kept, key=lambda file: file.step)
    assert [(file.step, file.score) for file in by_step] == [(10, 3.0), (20, 1.0), (30, 2.0)]
    assert [load_file(file.path)["w"].item() for file in by_step] == [-10.0, -20.0, -30.0]
    assert checkpoint.best_score == 1.0


def test_pain_17_no_file_is_written_for_a_value_that_is_not_new(tmp_path: Path) -> None:
    checkpoint = Files("1 steps", monitor="val/loss", top_k=-1, directory=tmp_path / "out", last=False)
    fit(checkpoint, [3.0, 1.0], train=batches(5), val_every="2 epochs", max_epochs=5)
    assert [file.step for file in checkpoint.kept] == [20, 10]


def test_pain_17_monitor_that_was_never_logged_is_an_error(tmp_path: Path) -> None:
    checkpoint = Files(monitor="nope", directory=tmp_path / "out", last=False)
    with pytest.raises(MetricError, match=r"ModelCheckpoint\(monitor='nope'\) was never logged. Accepted: .*val/loss"):
        fit(checkpoint, [1.0, 1.0])
    assert not (tmp_path / "out").exists()


def leg(checkpoint: ModelCheckpoint, values: list[float], epochs: int, folder: str = "states") -> None:
    """A leg of a run up to an epoch, which goes on from whole states in another folder."""
    states = ModelCheckpoint(directory=folder)
    fit(checkpoint, values, callbacks=[states], max_epochs=epochs, resume_from="latest")


def test_pain_18_the_list_of_the_best_survives_a_resume(tmp_path: Path) -> None:
    leg(Files(monitor="val/loss", directory=tmp_path / "out"), [2.0, 1.0], 2)
    second = Files(monitor="val/loss", directory=tmp_path / "out")
    leg(second, [1.5, 3.0, 3.0], 5)
    assert (second.best_score, second.best_path) == (1.0, tmp_path / "out" / "best.safetensors")
    assert files(tmp_path / "out") == {"best.safetensors": -2.0, "last.safetensors": -5.0}
    leg(Files(monitor="val/loss", directory=tmp_path / "out"), [0.5], 6)
    assert files(tmp_path / "out") == {"best.safetensors": -6.0, "last.safetensors": -6.0}


def test_resume_in_another_folder_leaves_the_older_one_alone(tmp_path: Path) -> None:
    leg(Files(monitor="val/loss", directory=tmp_path / "one"), [2.0, 1.0], 2)
    leg(Files(monitor="val/loss", directory=tmp_path / "two"), [1.5, 1.5, 0.5], 5)
    assert files(tmp_path / "one") == {"best.safetensors": -2.0, "last.safetensors": -2.0}
    assert files(tmp_path / "two") == {"best.safetensors": -5.0, "last.safetensors": -5.0}


def test_resume_names_files_that_are_gone(tmp_path: Path) -> None:
    leg(Files(monitor="val/loss", directory=tmp_path / "out"), [2.0], 1)
    (tmp_path / "out" / "best.safetensors").unlink()
    second = Files(monitor="val/loss", directory=tmp_path / "out")
    with pytest.warns(UserWarning, match=r"best.safetensors' of step 1 is gone"):
        leg(second, [3.0], 2)
    assert second.best_score == 3.0


def killed_leg(files: ModelCheckpoint, name: str = "run") -> None:
    """A leg that ends in its fourth step, with whole states of steps 1 and 2 and no clean-up, as after a kill."""
    states = ModelCheckpoint(directory="states", top_k=-1, save_on_exception=False)
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(files, [4.0, 3.0, 2.0], train=Breaking(), callbacks=[states], max_epochs=4, name=name)
    remove_folder(Path("states/step=000003"))


class Breaking:
    """One batch in each of three epochs, and then one that breaks the run."""

    def __init__(self) -> None:
        self.num_passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_passes += 1
        return iter([torch.ones(1) if self.num_passes <= 3 else -torch.ones(1)])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1, "filename": "{step}"},
        {"top_k": -1, "monitor": "val/loss"},
        {"top_k": -1, "monitor": "val/loss", "last": False},
    ],
)
def test_files_of_a_killed_leg_are_written_anew(tmp_path: Path, options: dict[str, Any]) -> None:
    def files_in(folder: str) -> ModelCheckpoint:
        return Files(directory=folder, save_on_exception=False, **options)

    killed_leg(files_in("out"))
    before = set(files(tmp_path / "out"))
    assert any("step=3" in name for name in before)
    again = ModelCheckpoint(directory="states", top_k=-1)
    # Validation gives another value than in the leg that was killed, so that the file has another name.
    fit(files_in("out"), [2.5, 1.0], callbacks=[again], max_epochs=4, resume_from="latest")
    fit(files_in("whole"), [4.0, 3.0, 2.5, 1.0], max_epochs=4, name="whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert before != set(files(tmp_path / "out"))


def test_files_of_a_killed_leg_whose_step_does_not_come_again_stay(tmp_path: Path) -> None:
    by_step: dict[str, Any] = {"top_k": -1, "filename": "{step}"}
    killed_leg(Files(directory="out", save_on_exception=False, **by_step))
    states = ModelCheckpoint(directory="states", top_k=-1)
    fit(Files(directory="out", **by_step), callbacks=[states], max_epochs=2, resume_from="latest")
    assert "step=3.safetensors" in files(tmp_path / "out")


def test_a_branch_of_a_killed_leg_leaves_its_files_alone(tmp_path: Path) -> None:
    killed_leg(Files(directory="out", save_on_exception=False))
    with pytest.warns(UserWarning, match=r"last.safetensors' is there already, and stays; this run writes 'last-v2"):
        states = ModelCheckpoint(directory="branch")
        fit(Files(directory="out"), callbacks=[states], max_epochs=4, name="branch", resume_from="states/step=000002")
    assert files(tmp_path / "out") == {"last.safetensors": -3.0, "last-v2.safetensors": -4.0}


def test_two_callbacks_in_one_folder_know_the_files_of_a_killed_leg_apart(tmp_path: Path) -> None:
    def leg(train: Any, resume_from: str | None = None) -> None:
        two = [Files(directory="out", save_on_exception=False, last=False, top_k=-1, filename="{step}") for _ in "ab"]
        states = ModelCheckpoint(directory="states", top_k=-1, save_on_exception=False)
        with pytest.warns(UserWarning, match=r"step=\d.safetensors' is there already, and stays; .*'step=\d-v2"):
            fit(two[0], train=train, callbacks=[two[1], states], max_epochs=4, resume_from=resume_from)

    with pytest.raises(RuntimeError, match="broken batch"):
        leg(Breaking())
    remove_folder(Path("states/step=000003"))
    leg(batches(1), "latest")
    expected = {f"step={step}{mark}.safetensors": -float(step) for step in (1, 2, 3, 4) for mark in ("", "-v2")}
    assert files(tmp_path / "out") == expected


def test_the_run_and_the_step_stand_in_the_metadata_of_a_file(tmp_path: Path) -> None:
    trainer = fit(Files(directory=tmp_path / "out"), train=batches(3))
    with safe_open(tmp_path / "out/last.safetensors", framework="pt") as file:
        metadata = file.metadata()
    origin = {"run": trainer.run_id, "callback": "ModelCheckpoint", "step": 3}
    assert {**metadata, "loopwright.saved_by": json.loads(metadata["loopwright.saved_by"])} == {
        "format": "pt",
        "loopwright.saved_by": origin,
    }


def test_latest_where_weights_alone_are_says_so_and_how_to_start_with_them(caplog: pytest.LogCaptureFixture) -> None:
    fit(Files(top_k=-1, filename="{step}"), train=batches(2), name="run")
    with pytest.warns(UserWarning, match="is there already, and stays"):
        trainer = fit(Files(), train=batches(2), name="run", resume_from="latest")
    assert trainer.state.step == 2
    assert caplog.messages[0] == (
        "resume_from='latest': no checkpoint in 'runs/run/checkpoints'. The run begins anew. There are weights alone: "
        "last.safetensors, step=2.safetensors. No run can go on from them; one can start with them: "
        "load_weights(task, 'runs/run/checkpoints/last.safetensors') before fit, or load_weights(self, ...) in the "
        "task's __init__. ModelCheckpoint() without save_weights_only keeps what a run can go on from."
    )


def test_a_second_fit_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", directory=tmp_path / "out")
    fit(checkpoint, [1.0])
    with pytest.warns(UserWarning, match="is there already, and stays; this run writes '(best|last)-v2.safetensors'"):
        fit(checkpoint, [5.0, 4.0])
    assert checkpoint.best_score == 4.0
    assert files(tmp_path / "out") == {
        "best.safetensors": -1.0,
        "last.safetensors": -1.0,
        "best-v2.safetensors": -2.0,
        "last-v2.safetensors": -2.0,
    }


@pytest.mark.parametrize("saves", [True, False])
def test_exception_saves_last(tmp_path: Path, saves: bool) -> None:
    checkpoint = Files("100 steps", directory=tmp_path / "out", save_on_exception=saves)
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(checkpoint, train=[*batches(3), -torch.ones(1)])
    assert (files(tmp_path / "out") if saves else None) == ({"last.safetensors": -3.0} if saves else None)
    assert (tmp_path / "out").exists() == saves


def test_exception_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    checkpoint = Files(directory=tmp_path / "out")
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(checkpoint, train=[-torch.ones(1)])
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path: Path) -> None:
    checkpoint = Files(2, directory=tmp_path / "out")
    with pytest.warns(UserWarning, match="'w' is not finite at step 4; nothing is written"):
        fit(checkpoint, train=[*batches(2), torch.tensor([math.inf]), *batches(3)])
    assert files(tmp_path / "out") == {"last.safetensors": -2.0}


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit(Files(monitor="val/loss"), [1.0], fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_monitor_of_training(tmp_path: Path) -> None:
    checkpoint = Files(monitor="train/loss", top_k=2, directory=tmp_path / "out", last=False)
    fit(checkpoint, train=batches(2), max_epochs=3)
    assert [(file.step, file.score) for file in checkpoint.kept] == [(2, 7.0), (4, 7.0)]


def test_file_name_takes_counters_and_metrics_of_this_very_save(tmp_path: Path) -> None:
    named = Files(monitor="val/loss", directory=tmp_path / "out", last=False, filename="a_{step:04d}{val/other}")
    fit(named, [1.0, 2.0])
    assert files(tmp_path / "out") == {"a_step=0001val_other=0.0.safetensors": -1.0}
    stale = Files(monitor="val/loss", directory=tmp_path / "two", last=False, filename="{train/loss}")
    with pytest.raises(MetricError, match=r"'train/loss' has no new value at this save. .*Accepted: .*val/loss"):
        fit(stale, [1.0, 2.0])


def test_same_name_twice_keeps_both(tmp_path: Path) -> None:
    checkpoint = Files(monitor="val/loss", top_k=2, directory=tmp_path / "out", last=False, filename="{epoch}")
    fit(checkpoint, [2.0, 1.0], train=batches(2), val_every=1, max_epochs=1)
    assert files(tmp_path / "out") == {"epoch=0.safetensors": -1.0, "epoch=0-v2.safetensors": -2.0}


def test_any_number_of_files(tmp_path: Path) -> None:
    fit(Files(monitor="val/loss", top_k=10**30, last=False, directory=tmp_path / "out"), [1.0, 2.0])
    assert files(tmp_path / "out") == {"step=1-val_loss=1.safetensors": -1.0, "step=2-val_loss=2.safetensors": -2.0}


# The files' size is limited as a full disk would do it: after the first save, so that the second one fails.
FULL_DISK = """
import resource
from pathlib import Path

import torch
from torch import nn

from loopwright import CheckpointError, ModelCheckpoint, Task, Trainer


class Large(Task):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100_000))

    def training_step(self, batch, batch_idx):
        return self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


checkpoint = ModelCheckpoint(save_weights_only=True, directory="out")
trainer = Trainer(max_epochs=2, callbacks=checkpoint, trackers=False, progress=False)
trainer.on("epoch_start", lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)), once=2)
try:
    trainer.fit(Large(), [torch.ones(1)])
except CheckpointError as error:
    print(type(error.__cause__).__name__, error, *getattr(error, "__notes__", []))
"""


def test_a_save_that_fails_names_file_and_reason_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    run = nursery().run("-c", FULL_DISK, timeout=100)
    assert run.returncode == 0, run.stderr
    path = tmp_path / "out" / "last.safetensors"
    assert f"ModelCheckpoint could not write '{path}' at step 2: " in run.stdout
    assert "File too large" in run.stdout
    assert "choose another folder by directory=" in run.stdout
    assert [entry.name for entry in path.parent.iterdir()] == ["last.safetensors"]
    assert load_file(path)["w"].tolist() == [-1.0] * 100_000
