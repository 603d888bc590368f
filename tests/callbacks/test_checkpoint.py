"""`ModelCheckpoint` with whole states, in real fits: the weight in one is minus the number of its step."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import EMA, Callback, CheckpointError, ConfigError, MetricError, ModelCheckpoint, Trainer
from loopwright.checkpoint.claims import FolderClaim
from loopwright.checkpoint.finding import best, newest
from loopwright.checkpoint.reading import open_checkpoint

from ..nursery import nursery
from .counting import EVERY, Counting, batches, fit, states


def steps(folder: Path) -> list[int]:
    """The steps of the whole states in a folder, after each was read and compared with its name."""
    found = states(folder)
    assert all(name.startswith(f"step={-int(weight):06d}") for name, weight in found.items())
    return sorted(-int(weight) for weight in found.values())


def scores(folder: Path) -> dict[int, list[float]]:
    """The scores in the manifests, by step."""
    manifests = [open_checkpoint(entry).manifest for entry in folder.iterdir()]
    return {int(each.progress["step"]): [score["value"] for score in each.scores] for each in manifests}


def test_the_newest_is_kept_as_a_folder_named_by_its_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    fit(checkpoint, train=batches(3), max_epochs=2.5)
    folder = tmp_path / "runs/run/checkpoints"
    # max_epochs=2.5 of 3 batches: the first step boundary at or after 7.5 batches
    assert states(folder) == {"step=000008": -8.0}
    assert checkpoint.last_path == folder / "step=000008"
    assert checkpoint.best_path is None
    assert newest(folder).manifest.progress["batch"] == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("every", "accumulate", "expected"), EVERY)
def test_every_is_read_in_the_one_grammar(tmp_path: Path, every: Any, accumulate: int, expected: list[int]) -> None:
    fit(ModelCheckpoint(every, top_k=-1, last=False, directory="out"), train=batches(6), accumulate=accumulate)
    assert steps(tmp_path / "out") == expected


def test_pain_37_the_newest_stays_beside_the_best_and_without_a_second_copy(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Look(Callback):
        after = ("ModelCheckpoint",)

        def on_saved(self, trainer: Any, task: Any, path: Path) -> None:
            seen.append(sorted(int(each.name.removeprefix("step=")) for each in Path("out").glob("step=*")))

    checkpoint = ModelCheckpoint(monitor="val/loss", directory=tmp_path / "out")
    fit(checkpoint, [3.0, 1.0, 2.0, 0.5], callbacks=[Look()])
    assert seen == [[1], [2], [2, 3], [4]]
    assert checkpoint.best_path == checkpoint.last_path == tmp_path / "out/step=000004"
    assert (checkpoint.best_score, [file.step for file in checkpoint.kept]) == (0.5, [4])
    assert scores(tmp_path / "out") == {4: [0.5]}


def test_pain_17_one_checkpoint_of_a_step_has_the_score_of_that_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint("10 steps", monitor="val/loss", top_k=-1, directory="out")
    fit(checkpoint, [3.0, 1.0, 2.0], train=batches(30), val_every="10 steps", max_epochs=1)
    assert states(tmp_path / "out") == {"step=000010": -10.0, "step=000020": -20.0, "step=000030": -30.0}
    assert scores(tmp_path / "out") == {10: [3.0], 20: [1.0], 30: [2.0]}
    assert checkpoint.best_path == best(tmp_path / "out").path == tmp_path / "out/step=000020"  # type: ignore[union-attr]


def test_a_score_that_is_not_among_the_best_is_told_as_well(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(2, monitor="val/loss", directory="out")
    fit(checkpoint, [1.0, 3.0], train=batches(4), val_every=2, max_epochs=1)
    assert scores(tmp_path / "out") == {2: [1.0], 4: [3.0]}


def test_pain_17_monitor_that_was_never_logged_is_an_error(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="nope", directory=tmp_path / "out", last=False)
    with pytest.raises(MetricError, match=r"ModelCheckpoint\(monitor='nope'\) was never logged. Accepted: .*val/loss"):
        fit(checkpoint, [1.0, 1.0])
    assert not (tmp_path / "out").exists()


def test_a_value_that_comes_after_the_end_was_saved_belongs_to_that_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", directory=tmp_path / "out")
    fit(checkpoint, [0.5], train=batches(3), val_every="last", max_epochs=1)
    assert states(tmp_path / "out") == {"step=000003": -3.0}
    assert (checkpoint.best_score, checkpoint.best_path) == (0.5, tmp_path / "out/step=000003")


def test_a_window_that_is_open_at_the_validation_is_warned_of(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint("never", monitor="val/loss", directory=tmp_path / "out", last=False)
    arguments = {"accumulate": 2, "accumulate_across_epochs": "carry", "max_epochs": 2}
    with pytest.warns(UserWarning, match="the value 1 belongs to step 1, and 'step=000001' holds the state one step l"):
        fit(checkpoint, [1.0, 3.0], train=batches(3), **arguments)
    assert [file.step for file in checkpoint.kept] == [1]


def test_names_come_from_metrics_and_a_save_without_them_is_named_by_its_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(2, monitor="val/loss", top_k=3, directory="out", filename="{epoch}-{val/loss:.2f}")
    fit(checkpoint, [0.3, 0.2], train=batches(5), val_every="4 steps", max_epochs=2)
    assert states(tmp_path / "out") == {
        "epoch=0-val_loss=0.30": -4.0,
        "epoch=1-val_loss=0.20": -8.0,
        "step=000010": -10.0,
    }


def test_a_fixed_name_is_never_written_over(tmp_path: Path) -> None:
    fit(ModelCheckpoint(1, directory="out", filename="model"), train=batches(2))
    assert states(tmp_path / "out") == {"model-v2": -2.0}
    with pytest.warns(UserWarning, match="out/model-v2' is there already, and stays; this run writes 'model-v2-v2'"):
        fit(ModelCheckpoint(1, directory="out", filename="model-v2"), train=batches(1))


class Refuses(Callback):
    """Puts something in the way of a checkpoint, after it has its name."""

    before = ("ModelCheckpoint",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_save_state(self, trainer: Any, task: Any, state: Any) -> None:
        if trainer.state.step == 2:
            self.path.mkdir()
            (self.path / "theirs").touch()


def test_an_error_in_writing_keeps_the_earlier_one(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(1, directory="out", save_on_exception=False)
    with pytest.raises(CheckpointError, match=r"'.*out/step=000002' exists already, and nothing that exists"):
        fit(checkpoint, train=batches(3), callbacks=[Refuses(tmp_path / "out/step=000002")])
    assert os.listdir(tmp_path / "out/step=000002") == ["theirs"]
    shutil.rmtree(tmp_path / "out/step=000002")
    assert states(tmp_path / "out") == {"step=000001": -1.0}


def test_a_new_one_that_is_not_whole_replaces_nothing(tmp_path: Path) -> None:
    class Damages(Callback):
        before = ("ModelCheckpoint",)

        def on_saved(self, trainer: Any, task: Any, path: Path) -> None:
            if trainer.state.step == 2:
                with (path / "model.safetensors").open("r+b") as file:
                    file.truncate(20)

    checkpoint = ModelCheckpoint(1, directory="out")
    with pytest.warns(UserWarning, match="what was just saved is not whole, so the earlier ones stay: .*model.safeten"):
        fit(checkpoint, train=batches(2), callbacks=[Damages()])
    assert sorted(os.listdir(tmp_path / "out")) == ["step=000001", "step=000002"]
    assert checkpoint.last_path == tmp_path / "out/step=000001"
    with pytest.warns(UserWarning, match="'.*step=000002' is damaged, and passed over: .*model.safetensors.* 20"):
        assert newest(tmp_path / "out").path.name == "step=000001"  # type: ignore[union-attr]


def test_pain_18_the_list_of_the_best_survives_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    fit(ModelCheckpoint(monitor="val/loss", directory=folder), [2.0, 1.0, 1.2])
    assert steps(folder) == [2, 3]
    second = ModelCheckpoint(monitor="val/loss", directory=folder)
    fit(second, [1.5, 3.0], resume_from="latest", max_epochs=5)
    assert (second.best_score, second.best_path) == (1.0, folder / "step=000002")
    assert steps(folder) == [2, 5]
    fit(ModelCheckpoint(monitor="val/loss", directory=folder), [0.5], resume_from="latest", max_epochs=6)
    assert steps(folder) == [6]


def test_a_folder_that_was_moved_is_found_at_its_new_place(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss", directory="one"), [1.0, 2.0])
    (tmp_path / "one").rename(tmp_path / "two")
    second = ModelCheckpoint(monitor="val/loss", directory="two")
    fit(second, [3.0], resume_from="latest", max_epochs=3)
    assert steps(tmp_path / "two") == [1, 3]
    assert second.best_path == tmp_path / "two/step=000001"


def test_a_resume_elsewhere_and_a_branch_leave_the_older_ones_alone(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss", directory="one"), [2.0, 1.0])
    start = tmp_path / "one/step=000002"
    second = ModelCheckpoint(monitor="val/loss", directory="two")
    fit(second, [1.5, 1.5], resume_from=start, max_epochs=4)
    assert (steps(tmp_path / "one"), steps(tmp_path / "two")) == ([2], [4])
    assert second.best_path == start
    branch = ModelCheckpoint(monitor="val/loss", directory="one")
    fit(branch, [0.5, 0.7], resume_from=start, max_epochs=4, name="branch")
    assert branch.best_score == 0.5
    assert steps(tmp_path / "one") == [2, 3, 4]


def test_what_lies_behind_the_point_of_resuming_stays_and_is_named(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss", top_k=3, directory="out"), [3.0, 2.0, 1.0])
    second = ModelCheckpoint(monitor="val/loss", top_k=3, directory="out")
    with pytest.warns(UserWarning) as caught:
        fit(second, [0.5, 0.4], resume_from=tmp_path / "out/step=000001", max_epochs=3)
    texts = [str(each.message) for each in caught]
    assert any("step=000002, step=000003 in " in text and "saved behind step 1, from" in text for text in texts)
    assert {(file.path.name, file.score) for file in second.kept} == {
        ("step=000001", 3.0), ("step=000002-v2", 0.5), ("step=000003-v2", 0.4),
    }  # fmt: skip
    assert len(steps(tmp_path / "out")) == 5


def test_a_kill_between_commit_and_removal_is_made_up_for(tmp_path: Path) -> None:
    script = KILLED_AT_SAVE.format(tests=Path(__file__).parent)
    done = nursery().run("-c", script, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps(tmp_path / "out") == [2, 3, 4]  # 3 was the newest, and is not among the best
    fit(ModelCheckpoint(monitor="val/loss", directory="out"), [5.0], resume_from="latest", max_epochs=5)
    assert steps(tmp_path / "out") == [2, 5]


KILLED_AT_SAVE = """
import os, signal, sys
sys.path.insert(0, "{tests}")
from counting import fit
from loopwright import Callback, ModelCheckpoint


class Kills(Callback):
    before = ("ModelCheckpoint",)

    def on_saved(self, trainer, task, path):
        if trainer.state.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


fit(ModelCheckpoint(monitor="val/loss", directory="out"), [2.0, 1.0, 1.5, 1.6], callbacks=[Kills()])
"""


def test_another_watch_begins_a_new_list(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss", directory="out"), [1.0])
    with pytest.warns(
        UserWarning, match=r"kept state by \['val/loss', 'min'\], and this one keeps state by None. It beg"
    ):
        fit(ModelCheckpoint(directory="out"), [1.0], resume_from="latest", max_epochs=2)
    assert steps(tmp_path / "out") == [1, 2]


def test_two_callbacks_share_a_folder_and_keep_their_own(tmp_path: Path) -> None:
    often = ModelCheckpoint(1, directory="out", top_k=2)
    good = ModelCheckpoint("never", monitor="val/loss", last=False, directory="out")
    fit(often, [1.0, 2.0, 3.0], callbacks=[good])
    assert states(tmp_path / "out") == {"step=000001-v2": -1.0, "step=000002": -2.0, "step=000003": -3.0}
    assert good.best_path == tmp_path / "out/step=000001-v2"


@pytest.mark.parametrize("saves", [True, False])
def test_exception_saves_the_newest(tmp_path: Path, saves: bool) -> None:
    checkpoint = ModelCheckpoint("100 steps", directory=tmp_path / "out", save_on_exception=saves)
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(checkpoint, train=[*batches(3), -torch.ones(1)])
    assert (states(tmp_path / "out") if saves else None) == ({"step=000003": -3.0} if saves else None)
    assert (tmp_path / "out").exists() == saves


def test_what_an_exception_leaves_replaces_nothing_until_a_run_goes_on_from_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(ModelCheckpoint(2, directory="out"), train=[*batches(3), -torch.ones(1)])
    assert steps(tmp_path / "out") == [2, 3]
    with pytest.warns(UserWarning, match="can't be equal bit for bit .* an exception ended the run"):
        fit(ModelCheckpoint(2, directory="out"), train=batches(4), resume_from="latest")
    assert steps(tmp_path / "out") == [4]


def test_exception_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(ModelCheckpoint(directory=tmp_path / "out"), train=[-torch.ones(1)])
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'w' is not finite at step 4; nothing is written"):
        fit(ModelCheckpoint(2, directory="out"), train=[*batches(2), torch.tensor([math.inf]), *batches(3)])
    assert steps(tmp_path / "out") == [2]


def test_asynchronous_saves_are_kept_and_removed_alike(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(1, monitor="val/loss", top_k=2, directory="out", asynchronous=True)
    fit(checkpoint, [3.0, 1.0, 2.0, 5.0, 6.0])
    assert steps(tmp_path / "out") == [2, 3, 5]
    assert [file.step for file in checkpoint.kept] == [2, 3, 5]
    again = ModelCheckpoint(1, monitor="val/loss", top_k=2, directory="out", asynchronous=True)
    fit(again, [0.5], resume_from="latest", max_epochs=6)
    assert steps(tmp_path / "out") == [2, 6]


@pytest.mark.parametrize("weights_only", [True, False])
def test_restoring_the_best(tmp_path: Path, weights_only: bool) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", restore_best=True, save_weights_only=weights_only)
    trainer = Trainer(callbacks=checkpoint, max_epochs=4, trackers=False, progress=False)
    task = Counting([3.0, 1.0, 2.0, 2.0])
    trainer.fit(task, batches(1), batches(1))
    assert task.w.item() == -2.0
    assert trainer.state.step == 4


def test_restoring_without_a_best_keeps_the_newest(tmp_path: Path) -> None:
    task = Counting([math.nan])
    trainer = Trainer(
        callbacks=ModelCheckpoint(monitor="val/loss", restore_best=True), max_epochs=1, trackers=False, progress=False
    )
    with pytest.warns(UserWarning, match="val/loss had no finite value, so that there is no best one"):
        trainer.fit(task, batches(1), batches(1))
    assert task.w.item() == -1.0


def test_restoring_what_averages_reached_needs_files_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation sees the weights of EMA, .* Use save_weights_only=True"):
        fit(ModelCheckpoint(monitor="val/loss", restore_best=True), [1.0], callbacks=[EMA()])


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val/loss"), [1.0], fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_what_is_kept_and_held() -> None:
    whole = "weights, optimizers, counters, random states, data position"
    notes = {
        ModelCheckpoint().plan_note: f"the newest: {whole}",
        ModelCheckpoint(top_k=3).plan_note: f"the 3 newest: {whole}",
        ModelCheckpoint(top_k=-1, last=False, monitor="val/loss").plan_note: f"all best of val/loss: {whole}",
        ModelCheckpoint(monitor="val/loss").plan_note: f"the best of val/loss and the newest: {whole}",
        ModelCheckpoint(save_weights_only=True).plan_note: "the newest: weights",
    }
    assert list(notes) == list(notes.values())


class TestClaim:
    def test_a_second_living_run_in_the_folder_is_refused_before_anything_runs(self, tmp_path: Path) -> None:
        claim = FolderClaim(tmp_path / "out", "other")
        task = Counting()
        trainer = Trainer(callbacks=ModelCheckpoint(directory="out"), max_epochs=1, trackers=False, progress=False)
        message = rf"another run writes into '.*out': process {os.getpid()} on .*, run other. Each would take"
        with pytest.raises(CheckpointError, match=message):
            trainer.fit(task, batches(1))
        assert task.w.item() == 0.0
        claim.release()
        assert not (tmp_path / "out").exists()  # as it was
        trainer.fit(task, batches(1))
        assert steps(tmp_path / "out") == [1]

    def test_folders_that_were_there_stay(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        claim = FolderClaim(tmp_path / "out/deep/er", "a")
        said = json.loads((tmp_path / "out/deep/er/.claim").read_text())
        assert (said["pid"], said["run"]) == (os.getpid(), "a")
        claim.release()
        claim.release()
        assert list((tmp_path / "out").iterdir()) == []

    def test_forked_processes_have_no_part_in_it_and_end_it_not(self, tmp_path: Path) -> None:
        claim = FolderClaim(tmp_path / "out", "a")
        waits = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=_release, args=(claim, waits))
        child.start()
        try:
            with pytest.raises(CheckpointError, match="another run writes into"):
                FolderClaim(tmp_path / "out", "b")
            claim.release()
            FolderClaim(tmp_path / "out", "b").release()  # although the child lives
        finally:
            waits.set()
            child.join(10)
        assert child.exitcode == 0

    def test_a_killed_run_leaves_nothing_that_blocks(self, tmp_path: Path) -> None:
        child = multiprocessing.get_context("fork").Process(target=_claim_and_die, args=(tmp_path / "out",))
        child.start()
        child.join(10)
        assert child.exitcode == -signal.SIGKILL
        assert (tmp_path / "out/.claim").exists()
        FolderClaim(tmp_path / "out", "b").release()
        assert not (tmp_path / "out/.claim").exists()


def _release(claim: FolderClaim, waits: Any) -> None:
    claim.release()
    waits.wait(10)


def _claim_and_die(folder: Path) -> None:
    claim = FolderClaim(folder, "a")
    assert claim is not None
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": -2}, r"ModelCheckpoint\(top_k=-2\)\. Expected an integer >= -1\. It is a number of checkpoints"),
        ({"top_k": 0, "last": False}, "saves nothing"),
        ({"last": "false"}, r"ModelCheckpoint\(last='false'\). Expected True or False"),
        ({"restore_best": 0}, r"restore_best=0\). Expected True or False"),
        ({"asynchronous": "no"}, r"asynchronous='no'\). Expected True or False"),
        ({"asynchronous": True, "save_weights_only": True}, "is for whole states. Leave it out"),
        ({"restore_best": True}, "has no best one. Name monitor="),
        ({"save_on_exception": 1}, r"save_on_exception=1\). Expected True or False"),
        ({"mode": "max"}, r"ModelCheckpoint\(mode='max'\) has no metric to compare. Name it by monitor="),
        ({"directory": 5}, r"ModelCheckpoint\(directory=5\). Expected the path of a folder; leave it out"),
        ({"directory": ""}, r"directory=''\). Expected the path of a folder"),
        ({"filename": 5}, r"ModelCheckpoint\(filename=5\). Expected a text, such as '{epoch}-{step}'"),
        ({"filename": "", "monitor": "val/loss"}, r"filename=''\). Expected a text"),
        ({"every": "2 parsecs"}, r"ModelCheckpoint\(every\)='2 parsecs' has an unknown unit"),
        ({"monitor": "val/loss", "mode": "lower"}, r"mode='lower'\). "),
        ({"filename": "{val/loss}"}, r"names 'val/loss'. Without monitor= no save has a new value"),
        ({"filename": "sub/{step}"}, "names a folder. Choose the folder by directory="),
        ({"filename": "{step"}, "can't be read: .* Expected text with fields"),
        ({"filename": "{}"}, "has a field without a name"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(**arguments)


@pytest.mark.parametrize("directory", ["file", "file/sub"])
def test_a_folder_that_can_not_be_written_to_is_an_error_before_anything_runs(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    task = Counting([1.0])
    trainer = Trainer(max_epochs=1, callbacks=ModelCheckpoint(directory=directory), trackers=False, progress=False)
    message = r"can't write to the folder '.*file.*': .*Not a directory.* choose another one by directory="
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.fit(task, batches(1), batches(1))
    assert isinstance(caught.value.__cause__, NotADirectoryError)
    assert (trainer.state.step, task.num_validations) == (0, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    with pytest.raises(CheckpointError, match="Permission denied"):
        fit(ModelCheckpoint(directory=tmp_path / "out" / "deeper"))
