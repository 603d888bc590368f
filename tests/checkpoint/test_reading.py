"""Damage is named: the file, what was expected and what was found. Nothing is read from what is damaged."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.finding import newest
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.distributed.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    contents = Contents(
        trees={"state": {"step": 3}, "optimizer": {"m": torch.arange(1000.0)}},
        weights={"model": {"a": torch.ones(300), "b": torch.ones(300)}},
        max_shard_size=1300,
    )
    return save_checkpoint(tmp_path / "all" / "a", contents, Facts(progress={"step": 3}))


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = [
    "optimizer.safetensors", "optimizer.json", "state.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json",
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"),
        (cut, r"expected \d+ bytes, found \d+"),
        (Path.unlink, "missing"),
        (swap, "no file"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_pain_19_each_damaged_file_is_named(
    saved: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(saved / name)
    with pytest.raises(CheckpointError, match=rf"a' is damaged: {re.escape(name)}: {message}\.$"):
        open_checkpoint(saved)
    with pytest.warns(UserWarning, match=rf"is damaged, and passed over: {re.escape(name)}: {message}"):
        assert newest(saved.parent) is None


def test_all_damage_is_listed_and_sizes_are_enough_for_most(saved: Path) -> None:
    cut(saved / "state.json")
    flip(saved / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: expected SHA.*; state.json: expected 10 bytes"):
        open_checkpoint(saved)
    with pytest.raises(CheckpointError, match=r"damaged: state.json: expected 10 bytes, found 9\.$"):
        open_checkpoint(saved, verify="sizes")


def test_a_damaged_header_is_seen_without_reading_all(saved: Path) -> None:
    flip(saved / "optimizer.safetensors", 8)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: .*can't be read as safetensors"):
        open_checkpoint(saved, verify="sizes")


@pytest.mark.parametrize("position", [0, 30, 200, 700, -3])
def test_a_manifest_that_was_changed_is_refused(saved: Path, position: int) -> None:
    flip(saved / "manifest.json", position)
    with pytest.raises(CheckpointError, match=r"manifest.json'"):
        open_checkpoint(saved)
    with pytest.warns(UserWarning, match="a checkpoint is passed over"):
        assert newest(saved.parent) is None


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with other values and the checksum that belongs to them, as the document describes it."""
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    change(values)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(values))


def test_manifests_of_other_versions_and_shapes(saved: Path) -> None:
    rewritten(saved, lambda values: values.update(sequence=7, later_addition=[1]))
    assert open_checkpoint(saved).manifest.sequence == 7
    rewritten(saved, lambda values: values["files"].update({"../x": {"size_bytes": 1, "sha256": ""}}))
    with pytest.raises(CheckpointError, match=r"no manifest: TypeError: it names the file '../x', which is not in"):
        open_checkpoint(saved)
    rewritten(saved, lambda values: values.pop("files"))
    with pytest.raises(CheckpointError, match=r"is no manifest: KeyError: 'files'"):
        open_checkpoint(saved)
    rewritten(saved, lambda values: values.update(format_version=3, versions={"loopwright": "9.0"}))
    with pytest.raises(CheckpointError, match=r"format version 3, written by {'loopwright': '9.0'}.*up to 2; update"):
        open_checkpoint(saved)
    for text in ("", "[]", "null", "{", '{"format_version": "1"}', "[" * 100_000):
        (saved / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json' is damaged|has the format version"):
            open_checkpoint(saved)


def test_files_that_do_not_belong_to_it_are_not_read(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "secret.json").write_text("{}")
    checkpoint = open_checkpoint(saved)
    assert checkpoint.unlisted_files == ("notes.txt", "secret.json")
    assert checkpoint.tree_names == ("optimizer", "state")
    with pytest.raises(CheckpointError, match=r"has no state 'secret'. Accepted: optimizer, state"):
        checkpoint.tree("secret")
    with pytest.raises(CheckpointError, match=r"has no state 'stat'. Did you mean 'state'\?"):
        checkpoint.tree("stat")
    with pytest.raises(CheckpointError, match=r"has no weights 'model_1'. Did you mean 'model'"):
        checkpoint.weights("model_1")
    with pytest.raises(CheckpointError, match=r"has no weights 'model_1'"):
        checkpoint.load_weights_into(nn.Linear(1, 1), base="model_1")


def test_what_is_no_checkpoint_is_explained(saved: Path, tmp_path: Path) -> None:
    cases = {
        tmp_path / "all" / "b": "is no checkpoint: it is not there. Beside it: a.",
        saved.parent: "is no checkpoint: it holds some: a. Name one of them.",
        saved.parent.parent: "is no checkpoint: it holds some: all/a. Name one of them.",
        saved / "state.json": "is no checkpoint: it is a file.",
    }
    (tmp_path / "others").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "others" / "pytorch_model.bin")
    cases[tmp_path / "others"] = "is no checkpoint: it has no manifest.json. In it: pytorch_model.bin."
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_checkpoint(path)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def test_a_pickle_is_never_opened(saved: Path, tmp_path: Path) -> None:
    for name in ("state.json", "optimizer.safetensors"):
        folder = tmp_path / f"with {name}"
        shutil.copytree(saved, folder)
        data = pickle.dumps(Trap())
        (folder / name).write_bytes(data)
        entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewritten(folder, lambda values, name=name, entry=entry: values["files"].update({name: entry}))  # type: ignore[misc]
        checkpoint = open_checkpoint(folder)
        with pytest.raises(CheckpointError, match="can't be read"):
            checkpoint.tree(name.partition(".")[0])
    assert not (tmp_path / "sprung").exists()


def test_another_models_weights_are_listed(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not fit Linear: missing \(2\): weight, bias; unexpected \(2\): a, b"):
        open_checkpoint(saved).load_weights_into(nn.Linear(2, 2))
    report = open_checkpoint(saved).load_weights_into(nn.Linear(2, 2), strict=False)
    assert (report.missing, report.unexpected) == (("weight", "bias"), ("a", "b"))
