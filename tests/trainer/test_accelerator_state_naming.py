"""Numbered checkpoints of an `Accelerator`, and `save_model`. F: facts of semantics about Accelerate; B: cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.project import ProjectConfiguration


def made(folder: Path | str, **options: object) -> tuple[Accelerator, nn.Module]:
    """An accelerator that numbers its checkpoints, with a model."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, project_config=project)
    return accelerator, accelerator.prepare(nn.Linear(1, 1))


def numbers(folder: Path) -> list[int]:
    """Those of the checkpoints that are there."""
    return sorted(int(entry.name.removeprefix("checkpoint_")) for entry in (folder / "checkpoints").iterdir())


def test_f41_the_limit_counts_the_new_one(tmp_path: Path) -> None:
    accelerator, _ = made(tmp_path, total_limit=2)
    kept = []
    for number in range(4):
        assert accelerator.save_iteration == number
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
        kept.append(numbers(tmp_path))
    assert kept == [[0], [0, 1], [1, 2], [2, 3]]
    accelerator.save_iteration = 10  # by numbers, not by names
    accelerator.save_state()
    assert numbers(tmp_path) == [3, 10]


def test_b31_the_oldest_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    accelerator, _ = made(tmp_path, total_limit=1)
    accelerator.save_state()
    accelerator.register_for_checkpointing(broken := nn.Linear(1, 1))
    broken.register_buffer("wrong", torch.ones(2, device="meta"))
    with pytest.raises(CheckpointError, match=r"meta"):
        accelerator.save_state()
    assert (numbers(tmp_path), accelerator.save_iteration) == ([0], 1)


def test_f42_loading_goes_on_with_the_next_number(tmp_path: Path) -> None:
    accelerator, model = made(tmp_path)
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        accelerator.save_state()
    again, loaded = made(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint_0' exists already.* set accelerator\.save_iteration = 3"):
        again.save_state()
    again.load_state()
    assert (loaded.weight.item(), again.save_iteration) == (3.0, 3)
    again.save_state()
    assert numbers(tmp_path) == [0, 1, 2, 3]
    branch, older = made(tmp_path)
    branch.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert (older.weight.item(), branch.save_iteration) == (2.0, 4)


def test_f43_other_folders_are_left_alone(tmp_path: Path) -> None:
    accelerator, model = made(tmp_path, total_limit=1)
    nn.init.constant_(model.weight, 5.0)
    accelerator.save_state()
    for name in ("notes", "checkpoint_7", "best_99"):
        (tmp_path / "checkpoints" / name).mkdir()
    again, loaded = made(tmp_path, total_limit=1)
    with pytest.warns(UserWarning, match=r"are left alone: \['best_99', 'checkpoint_7', 'notes'\]"):
        again.load_state()
    assert (loaded.weight.item(), again.save_iteration) == (5.0, 1)
    with pytest.warns(UserWarning, match=r"are left alone: \['best_99', 'checkpoint_7', 'notes'\]"):
        again.save_state()
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["best_99", "checkpoint_1", "checkpoint_7", "notes"]


def test_paths_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator, _ = made("project")
    assert accelerator.save_state() == str(tmp_path / "project" / "checkpoints" / "checkpoint_0")
    accelerator.load_state()
    plain = Accelerator(cpu=True)
    plain.prepare(nn.Linear(1, 1))
    plain.save_state("here")
    plain.load_state("here")
    assert (tmp_path / "here" / "manifest.json").is_file()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    accelerator, _ = made(tmp_path)
    with pytest.raises(CheckpointError, match=r"load_state\(\): there is no checkpoint in"):
        accelerator.load_state()
    with pytest.warns(UserWarning, match=r"automatic_checkpoint_naming=True gives checkpoints their names"):
        accelerator.save_state(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    homeless = Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(ConfigError, match=r"there is no project_dir\. Give Accelerator\(project_dir="):
        homeless.save_state()


# save_model


def four() -> nn.Module:
    """4 weights of 400 bytes."""
    module = nn.Module()
    for name in "abcd":
        module.register_parameter(name, nn.Parameter(torch.full((100,), float(ord(name)))))
    return module


def test_f46_shards_and_their_index(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(four())
    accelerator.save_model(model, tmp_path, max_shard_size="900B")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 1600
    assert index["weight_map"] == {"a": shards[0], "b": shards[0], "c": shards[1], "d": shards[1]}
    assert load_file(tmp_path / shards[1])["d"][0] == ord("d")
    accelerator.save_model(model, tmp_path, max_shard_size=500)
    assert len(list(tmp_path.iterdir())) == 5
    (tmp_path / "config.json").write_text("{}")
    accelerator.save_model(model, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_f47_tied_weights_are_stored_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    accelerator.save_model(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"a.weight"}


def test_a_path_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"save_model: the weights can't be written to '.*file'"):
        accelerator.save_model(four(), tmp_path / "file")
    accelerator.prepare(four())
    with pytest.raises(CheckpointError, match=r"file"):
        accelerator.save_state(tmp_path / "file" / "state")
    with pytest.raises(CheckpointError, match=r"the weight 'weight' can't be stored: it has no values \(device meta\)"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path / "meta")
    assert not (tmp_path / "meta").exists()
