"""The newest and the best: by what the manifests say, never by clocks or names."""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.finding import best, find_checkpoints, newest
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.reading import Checkpoint
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.distributed.errors import CheckpointError


def save(path: Path, *scores: tuple[str, str, float], **facts: Any) -> Path:
    listed = [{"name": name, "mode": mode, "value": value} for name, mode, value in scores]
    return save_checkpoint(path, Contents(trees={"s": torch.ones(10)}), Facts(scores=listed, **facts))


def name_of(checkpoint: Checkpoint | None) -> str | None:
    return None if checkpoint is None else checkpoint.path.name


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not" / "there"):
        assert find_checkpoints(folder) == []
        assert newest(folder) is None
        assert best(folder) is None


def test_b32_the_order_is_that_of_saving_whatever_names_and_clocks_say(tmp_path: Path) -> None:
    names = ["step-9", "step-10", "step-2", "a", "step-100"]
    for index, name in enumerate(names):
        save(tmp_path / name)
        for path in (tmp_path / name, tmp_path / name / "manifest.json"):
            os.utime(path, (1e9 - index * 1000, 1e9 - index * 1000))  # the clock runs backwards
    assert [each.path.name for each in find_checkpoints(tmp_path)] == names
    assert name_of(newest(tmp_path)) == "step-100"
    shutil.rmtree(tmp_path / "step-2")
    save(tmp_path / "b")
    assert [each.path.name for each in find_checkpoints(tmp_path)] == ["step-9", "step-10", "a", "step-100", "b"]


def test_the_newest_whole_one_is_taken_and_the_damaged_ones_are_named(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        save(tmp_path / name)
    (tmp_path / "3" / "s.json").write_text("{}")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "manifest.json").write_text("half")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert name_of(newest(tmp_path)) == "2"
    texts = [str(each.message) for each in caught]
    assert "4/manifest.json' is damaged: JSONDecodeError" in texts[0]
    assert re.search(r"3' is damaged, and passed over: s.json: expected \d+ bytes, found 2", texts[1])
    assert len(texts) == 2
    save_checkpoint(tmp_path / "5", Contents(), Facts())  # damaged neighbours are no obstacle, and no news
    with pytest.warns(UserWarning, match="4/manifest.json' is damaged"):
        assert name_of(newest(tmp_path)) == "5"


def test_what_is_being_written_and_what_is_none_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / ".b.host-1.partial")
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "latest").symlink_to("a")
    assert [each.path.name for each in find_checkpoints(tmp_path)] == ["a", "latest"]
    assert (tmp_path / ".b.host-1.partial").exists()


def test_training_goes_on_from_states_only(tmp_path: Path) -> None:
    save(tmp_path / "full")
    save(tmp_path / "weights", kind="weights")
    assert name_of(newest(tmp_path)) == "full"
    assert name_of(newest(tmp_path, kind=None)) == "weights"
    assert name_of(newest(tmp_path, kind="weights")) == "weights"


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("min", [math.nan, 0.5, math.nan, 0.4, 0.6], 3),
        ("max", [0.2, 0.9, 0.5, 0.7], 1),
        ("max", [math.nan, math.nan], None),
        ("min", [math.inf, math.nan], 0),
        ("min", [1.0, -math.inf, 0.0], 1),
        ("min", [0.3, 0.1, 0.1], 1),
    ],
)
def test_b34_the_best_score_wins_and_nan_never_does(
    tmp_path: Path, mode: str, values: list[float], expected: int | None
) -> None:
    for index, value in enumerate(values):
        save(tmp_path / str(index), ("val/loss", mode, value))
    save(tmp_path / "without")
    assert name_of(best(tmp_path)) == (None if expected is None else str(expected))


def test_the_best_of_several_metrics_is_asked_for_by_name(tmp_path: Path) -> None:
    save(tmp_path / "a", ("loss", "min", 0.1), ("acc", "max", 0.1))
    save(tmp_path / "b", ("loss", "min", 0.2), ("acc", "max", 0.2))
    assert [name_of(best(tmp_path, name)) for name in (None, "loss", "acc")] == ["a", "a", "b"]
    with pytest.raises(CheckpointError, match=r"has the score 'los'. Did you mean 'loss'\? Accepted: acc, loss"):
        best(tmp_path, "los")
    (tmp_path / "a" / "s.json").unlink()
    with pytest.warns(UserWarning, match="a' is damaged, and passed over: s.json: missing"):
        assert name_of(best(tmp_path, "loss")) == "b"
