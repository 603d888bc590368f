"""Resuming in every situation that the matrix does not hold: limits raised, other loaders, signals, damage, lineage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.checkpoint.finding import find_checkpoints, newest
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.distributed.errors import CheckpointError, ConfigError

from .resuming import Samples, Setting, Stop, Story, differences
from .tiny import Scalar, Watch, batches, ones, trainer

AT_END = Stop("stop", 999)
"""A leg that ends by its own limit, with a checkpoint of that."""


class TestLimits:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"max_epochs": 1}, {"max_epochs": 3}),
            ({"max_epochs": None, "max_steps": 4}, {"max_epochs": None, "max_steps": 11}),
            ({"max_epochs": None, "max_steps": 6}, {"max_epochs": None, "max_steps": 13}),
            (
                {"max_epochs": None, "max_steps": 2, "accumulate": 3},
                {"max_epochs": 2, "max_steps": None, "accumulate": 3},
            ),
        ],
    )
    def test_raised(self, first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
        expected = Story(Setting(**second), tmp_path / "whole").leg()
        story = Story(Setting(**first), tmp_path / "legs")
        story.leg(AT_END)
        assert differences(expected, story.leg(None, story.path_of(AT_END), **second)) == []

    @pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_epochs": None, "max_steps": 4}])
    def test_the_same_again_trains_nothing_and_is_whole(self, limit: dict[str, Any], tmp_path: Path) -> None:
        expected = Story(Setting(**limit), tmp_path / "whole").leg()
        found = Story(Setting(**limit), tmp_path / "legs").through([AT_END, Stop("stop", 998)])
        assert differences(expected, found) == []

    def test_a_checkpoint_of_a_run_that_is_over_adds_no_row(self, tmp_path: Path) -> None:
        def leg(path: Path | None) -> list[Any]:
            found = trainer(max_steps=3, log_every="2 steps", trackers="jsonl", project_dir=tmp_path, name="run")
            found.fit(Scalar(), ones(5), resume_from=path)
            if path is None:
                found.save_state(tmp_path / "end")
            return (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()

        assert leg(None) == leg(tmp_path / "end")


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 1), (1, 0)])
def test_another_number_of_workers(before: int, after: int, tmp_path: Path) -> None:
    expected = Story(Setting(), tmp_path / "whole").leg()
    story = Story(Setting(workers=before), tmp_path / "legs")
    story.leg(Stop("stop", 4))
    assert differences(expected, story.leg(None, story.path_of(Stop("stop", 4)), workers=after)) == []


class Stream(IterableDataset[Any]):
    """Samples one after another."""

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(22)
        return (samples[index] for index in range(len(samples)))


class StatefulStream(Stream):
    """The same, which knows where it is; `num_read` counts what it was asked for."""

    num_read = 0

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(22)
        while self.place < 22:
            self.place += 1
            StatefulStream.num_read += 1
            yield samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def stateful_loader() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Samples(22), batch_size=4, shuffle=True)


LOADERS = {
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a stream in workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "a stream with state": lambda: DataLoader(StatefulStream(), batch_size=4),
    "StatefulDataLoader": stateful_loader,
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("stops", [[Stop("stop", 4)], [Stop("stop", 1), Stop("stop", 8)]], ids=["once", "twice"])
@pytest.mark.parametrize("kind", LOADERS)
def test_other_loaders(kind: str, stops: list[Stop], tmp_path: Path) -> None:
    setting = Setting(make_loader=LOADERS[kind], val_every="2 steps")
    expected = Story(setting, tmp_path / "whole").leg()
    found = Story(setting, tmp_path / "legs").through(stops)
    assert list(expected.seen.values()) == list(found.seen.values())
    assert differences(expected, found) == []


def test_a_stream_with_state_is_not_read_again(tmp_path: Path) -> None:
    story = Story(Setting(make_loader=LOADERS["a stream with state"], max_epochs=1), tmp_path)
    story.leg(Stop("stop", 4))
    StatefulStream.num_read = 0
    story.leg(None, story.path_of(Stop("stop", 4)))
    assert StatefulStream.num_read == 22 - 16


class Terminated(Callback):
    """Sends SIGTERM to its own process, once, in the validation behind so many micro-batches, or in training."""

    def __init__(self, at: int, event: str) -> None:
        self.at, self.has_sent = at, False
        setattr(self, f"on_{event}", self.look)

    def look(self, trainer: Any, task: Any, *values: Any) -> None:
        if not self.has_sent and trainer.state.micro_step == self.at and trainer.state.stage != "sanity":
            self.has_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("event", "at"),
    [
        ("validation_batch_end", 2),
        ("validation_batch_end", 6),
        ("validation_end", 6),
        ("batch_end", 6),
        ("epoch_end", 6),
    ],
)
def test_sigterm_loses_nothing(event: str, at: int, tmp_path: Path) -> None:
    def leg(folder: str, *callbacks: Callback, **options: Any) -> Any:
        task = Scalar(lr=0.1, momentum=0.9)
        values = torch.arange(12.0)
        found = trainer(
            max_epochs=2, callbacks=[ModelCheckpoint("100 steps"), *callbacks], trackers="jsonl", log_every=1,
            project_dir=tmp_path / folder, name="run", val_every="2 steps",
        )  # fmt: skip
        torch.manual_seed(1)
        found.fit(task, DataLoader(values, batch_size=2, shuffle=True), batches(1, 2, 3, 6), **options)
        return task.value, found.state.counters(), found.metrics

    expected = leg("whole")
    with pytest.raises(SystemExit, match="143"):
        leg("legs", Terminated(at, event))
    assert leg("legs", resume_from="latest") == expected
    rows = [(tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("whole", "legs")]
    assert rows[0] == rows[1]


class TestDamage:
    """The newest whole checkpoint is taken, and what is wrong with a newer one is said."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run" / "checkpoints"

        def save(trainer: Any, task: Any, outputs: Any) -> None:
            trainer.save_state(folder / f"step={trainer.state.step:06d}")

        trainer(max_steps=4, callbacks=Watch(batch_end=save), project_dir=tmp_path, name="run").fit(Scalar(), ones(9))
        return folder

    def resumed_step(self, folder: Path, wanted: str | Path = "latest") -> int | None:
        found = trainer(max_steps=5, project_dir=folder.parent.parent, name="run")
        found.fit(Scalar(), ones(9), resume_from=wanted)
        return found.resumed_step

    def test_a_flipped_bit(self, folder: Path) -> None:
        file = folder / "step=000004" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=r"step=000004' is damaged, .*model.safetensors.*expected.*found"):
            assert self.resumed_step(folder) == 3
        with pytest.raises(CheckpointError, match=r"is damaged: model.safetensors.*expected"):
            self.resumed_step(folder, folder / "step=000004")

    def test_a_truncated_file(self, folder: Path) -> None:
        file = folder / "step=000004" / "state.json"
        os.truncate(file, file.stat().st_size // 2)
        with pytest.warns(UserWarning, match=r"step=000004' is damaged, .*state.json.*bytes"):
            assert self.resumed_step(folder) == 3

    def test_a_missing_file(self, folder: Path) -> None:
        (folder / "step=000004" / "optimizers.json").unlink()
        (folder / "step=000003" / "manifest.json").unlink()  # no checkpoint at all
        with pytest.warns(UserWarning, match=r"step=000004' is damaged, .*optimizers.json"):
            assert self.resumed_step(folder) == 2

    def test_what_is_being_written_is_none(self, folder: Path) -> None:
        unfinished = folder / ".step=000009.host-1.tmp"
        shutil.copytree(folder / "step=000004", unfinished)
        (unfinished / "manifest.json").unlink()
        assert self.resumed_step(folder) == 4

    def test_clocks_and_names_say_nothing(self, folder: Path) -> None:
        for number in range(1, 5):
            for file in (folder / f"step=00000{number}").iterdir():
                os.utime(file, (time.time() - number * 1e6,) * 2)
        (folder / "step=000004").rename(folder / "a")
        (folder / "step=000001").rename(folder / "z")
        assert self.resumed_step(folder) == 4

    def test_a_folder_that_cant_be_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="can't"):
            trainer(callbacks=ModelCheckpoint(directory=tmp_path / "file" / "x")).fit(Scalar(), ones(3))

    def test_no_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Any) -> Any:
            found = list(statvfs(path))
            found[4] = 0  # free blocks
            return os.statvfs_result(found)

        statvfs = os.statvfs
        story = Story(Setting(max_epochs=1), tmp_path)
        story.leg(Stop("save", 1))
        monkeypatch.setattr(os, "statvfs", full)
        with pytest.raises(CheckpointError, match=r"needs .*, and 0 bytes are free .*Nothing was written"):
            story.leg(Stop("save", 3))
        assert [each.path.name for each in find_checkpoints(tmp_path)] == ["save-1"]

    def test_two_living_runs_in_one_folder(self, tmp_path: Path) -> None:
        def second(*_: Any) -> None:
            with pytest.raises(CheckpointError, match="another run writes into"):
                trainer(callbacks=ModelCheckpoint(directory=tmp_path / "out")).fit(Scalar(), ones(3))

        trainer(callbacks=[ModelCheckpoint(directory=tmp_path / "out"), Watch(fit_start=second)]).fit(Scalar(), ones(3))

    def test_two_runs_one_after_another_in_one_folder(self, tmp_path: Path) -> None:
        for step in (3, 2):
            trainer(max_steps=step, callbacks=ModelCheckpoint(directory=tmp_path)).fit(Scalar(), ones(5))
        steps = [each.manifest.progress["step"] for each in find_checkpoints(tmp_path)]
        assert steps == [3, 2]
        found = newest(tmp_path)
        assert found is not None
        assert found.manifest.progress["step"] == 2  # the newest is what was saved last, and no highest number


def test_the_lineage_of_three_legs(tmp_path: Path) -> None:
    story = Story(Setting(), tmp_path)
    stops = [Stop("stop", 2), Stop("stop", 4), Stop("stop", 7)]
    story.leg(stops[0])
    with pytest.warns(UserWarning, match="can't be equal bit for bit.*accumulate was 1 and is 2"):
        story.leg(stops[1], story.path_of(stops[0]), accumulate=2)
    with pytest.warns(UserWarning, match="accumulate was 2 and is 1"):
        story.leg(stops[2], story.path_of(stops[1]))
    first, second, third = (open_checkpoint(story.path_of(stop)).manifest for stop in stops)
    assert first.parent is None
    assert second.parent is not None
    assert third.parent is not None
    assert (second.parent["checkpoint"], third.parent["checkpoint"]) == ("stop-2", "stop-4")
    assert (second.parent["step"], third.parent["step"]) == (first.progress["step"], second.progress["step"])
    assert list(second.changes) == ["accumulate was 1 and is 2"]
    assert len({each.run["id"] for each in (first, second, third)}) == 1
    assert [each.sequence for each in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("at", [3, 6], ids=["inside an epoch", "at its end"])
def test_a_leg_that_is_stopped_before_it_began_changes_nothing(at: int, tmp_path: Path) -> None:
    expected = Story(Setting(), tmp_path / "whole").leg()
    found = Story(Setting(), tmp_path / "legs").through([Stop("stop", at), Stop("start", 0)])
    assert differences(expected, found) == []


def test_rows_after_a_rewind_are_there_once(tmp_path: Path) -> None:
    """From the first of several checkpoints, with rows of a later life behind it."""
    expected = Story(Setting(), tmp_path / "whole").leg()
    story = Story(Setting(), tmp_path / "legs")
    story.leg(Stop("save", 2))
    story.leg(Stop("save", 7), story.path_of(Stop("save", 2)))
    found = story.leg(None, story.path_of(Stop("save", 2)))
    assert differences(expected.records, found.records) == []
    keys = [(step, name) for step, row in found.records for name in row if name != "epoch"]
    assert len(keys) == len(set(keys))


def test_what_epoch_starts_log_counts_once(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_epoch_start(self, trainer: Any, task: Any) -> None:
            trainer.log("begun", trainer.state.batch, on_step=False, on_epoch=True)

    def leg(name: str, at: int | None = None, resume_from: Path | None = None) -> str:
        def leave(trainer: Any, task: Any, outputs: Any) -> None:
            if trainer.state.step == at:
                trainer.save_state(tmp_path / "saved")
                trainer.stop("the leg ends")

        found = trainer(
            callbacks=[Logs(), Watch(batch_end=leave)], trackers="jsonl", project_dir=tmp_path / name, name="run"
        )  # fmt: skip
        found.fit(Scalar(), ones(6), resume_from=resume_from)
        return (tmp_path / name / "run" / "metrics.jsonl").read_text()

    leg("legs", 3)
    assert leg("legs", None, tmp_path / "saved") == leg("whole")
    assert json.loads(leg("more").splitlines()[-1])["begun"] == 0


@pytest.mark.parametrize("wanted", [3, b"latest", ""])
def test_what_resume_from_accepts(wanted: Any) -> None:
    with pytest.raises(ConfigError, match="Expected 'latest', 'best', the path of a checkpoint, or None"):
        trainer().fit(Scalar(), ones(3), resume_from=wanted)


def test_no_checkpoint_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'.*/nothing' is no checkpoint: it is not there"):
        trainer().fit(Scalar(), ones(3), resume_from=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"'latset' is no checkpoint: .*Expected 'latest', 'best', or the path"):
        trainer().fit(Scalar(), ones(3), resume_from="latset")
    with pytest.raises(CheckpointError, match="no checkpoint with a score"):
        trainer().fit(Scalar(), ones(3), resume_from="best")


@pytest.mark.parametrize("change", [{"progress": {"step": 7}}, None])
def test_entries_of_the_state_are_not_for_callbacks(change: dict[str, Any] | None, tmp_path: Path) -> None:
    def spoil(trainer: Any, task: Any, state: dict[str, Any]) -> None:
        state.update(change) if change else state.pop("progress")

    found = trainer(callbacks=[Watch(save_state=spoil)])
    found.on("fit_end", lambda trainer, task: trainer.save_state(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"on_save_state removed or replaced \['progress'\]"):
        found.fit(Scalar(), ones(3))
    assert not (tmp_path / "saved").exists()


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    class Other(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))

    first = trainer(max_steps=2)
    first.fit(Scalar(), ones(3))
    first.save_state(tmp_path / "saved")
    other = Other()
    with pytest.raises(CheckpointError, match=r"mismatched \(1\): w \(saved as \(\), here \(2,\)\)"):
        trainer().fit(other, ones(3), resume_from=tmp_path / "saved")
    assert other.w.tolist() == [0, 0]
