"""Checkpoints on disk: whole or absent, and read by other libraries."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.finding import newest
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.saving import save_checkpoint, start_saving
from loopwright.checkpoint.space import check_space, readable
from loopwright.distributed.errors import CheckpointError

from ..nursery import nursery

FACTS = Facts(progress={"step": 10}, world_size=1, strategy="SingleDeviceStrategy", run={"id": "r1"})


def contents_of(value: float, size: int = 100) -> Contents:
    """A state whose every number is the value."""
    return Contents(
        trees={"state": {"step": value}, "optimizer": {"exp_avg": torch.full((size,), value)}},
        weights={"model": {"w": torch.full((size,), value)}},
    )


def values_of(path: Path) -> set[float]:
    """All numbers of such a checkpoint."""
    checkpoint = open_checkpoint(path)
    tensors = [checkpoint.tree("optimizer")["exp_avg"], checkpoint.weights()["w"]]
    return {checkpoint.tree("state")["step"], *(number for tensor in tensors for number in tensor.unique().tolist())}


def test_a_checkpoint_holds_what_was_given(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    contents = Contents(
        trees={"state": {"epoch": 1, "nan": float("nan")}, "optimizer": optimizer.state_dict()},
        weights={"model": module.state_dict(), "model_1": {"w": torch.ones(2)}},
    )
    path = tmp_path / "runs" / "step-1"
    assert save_checkpoint(path, contents, FACTS) == path
    assert os.listdir(path.parent) == ["step-1"]
    assert sorted(os.listdir(path)) == [
        *("manifest.json", "model.safetensors", "model_1.safetensors"),
        *("optimizer.json", "optimizer.safetensors", "state.json"),
    ]
    checkpoint = open_checkpoint(path)
    assert checkpoint.tree_names == ("optimizer", "state")
    assert checkpoint.weights_names == ("model", "model_1")
    loaded = checkpoint.tree("optimizer")
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
    for index, state in optimizer.state_dict()["state"].items():
        assert {key: value.tolist() for key, value in loaded["state"][index].items()} == {
            key: value.tolist() for key, value in state.items()
        }
    other = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    assert not checkpoint.load_weights_into(other)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in module.state_dict().items())
    assert load_file(path / "model.safetensors").keys() == module.state_dict().keys()
    assert checkpoint.manifest.progress == {"step": 10}
    assert (checkpoint.manifest.sequence, checkpoint.manifest.kind) == (1, "state")


def test_facts_come_back_also_where_they_are_odd(tmp_path: Path) -> None:
    facts = Facts(
        kind="weights", progress={"step": 3, "epoch": 0.5}, world_size=2, strategy="x", run={"id": "é", "n": (1, 2)},
        parent={"path": "a", "sequence": 41, "run": "r0", "step": 2}, changes=["lr: 1 -> 2"],
        scores=[{"name": "val/loss", "mode": "min", "value": float("nan")}], inexact=("why",), config={"betas": (0.9,)},
    )  # fmt: skip
    save_checkpoint(tmp_path / "a", Contents(), facts)
    manifest = open_checkpoint(tmp_path / "a").manifest
    assert (manifest.kind, manifest.progress, manifest.world_size) == ("weights", {"step": 3, "epoch": 0.5}, 2)
    assert (manifest.run, manifest.parent, manifest.config) == (facts.run, facts.parent, facts.config)
    assert (manifest.changes, manifest.inexact) == (("lr: 1 -> 2",), ("why",))
    assert manifest.scores[0]["value"] != manifest.scores[0]["value"]
    assert manifest.sequence == 42  # above the parent's, wherever that is
    text = (tmp_path / "a" / "manifest.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    with pytest.raises(CheckpointError, match=r"manifest\.config\.task is of type .*Linear"):
        save_checkpoint(tmp_path / "b", Contents(), Facts(config={"task": nn.Linear(1, 1)}))
    with pytest.raises(CheckpointError, match=r"manifest\.run\.x is a tensor; the facts of a checkpoint are small"):
        save_checkpoint(tmp_path / "b", Contents(), Facts(run={"x": torch.ones(1)}))
    assert os.listdir(tmp_path) == ["a"]


def test_a_tree_fills_existing_tensors_in_place(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    saved = {"base": base, "row": base[1], "half": torch.ones(2).half(), "turned": torch.randn(2, 3).t(), "n": 1}
    save_checkpoint(tmp_path / "a", Contents(trees={"s": saved}), FACTS)
    memory = torch.zeros(3, 4)
    mine = {
        "base": memory, "row": memory[1], "half": torch.zeros(3).half(), "turned": torch.zeros(2, 3).t(), "n": 0,
    }  # fmt: skip
    found = open_checkpoint(tmp_path / "a").tree("s", into=mine)
    assert torch.equal(memory, base)
    assert found["base"].data_ptr() == memory.data_ptr()
    assert found["row"].data_ptr() == memory[1].data_ptr()
    assert torch.equal(mine["turned"], saved["turned"])  # type: ignore[call-overload]
    assert found["half"].tolist() == [1, 1]  # of another shape: not filled
    assert mine["half"].tolist() == [0, 0, 0]  # type: ignore[attr-defined]
    assert found["n"] == 1


def test_loaded_values_do_not_change_with_the_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", contents_of(3.0), FACTS)
    checkpoint = open_checkpoint(tmp_path / "a")
    tensors = [checkpoint.tree("optimizer")["exp_avg"], checkpoint.weights()["w"]]
    for file in (tmp_path / "a").glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(-50, os.SEEK_END)
            stream.write(b"\xff" * 50)
    assert [tensor.unique().tolist() for tensor in tensors] == [[3.0], [3.0]]


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", contents_of(1.0), FACTS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("a", "full", "file", "link"):
        with pytest.raises(CheckpointError, match=f"{name}' exists already, and nothing that exists is overwritten"):
            save_checkpoint(tmp_path / name, contents_of(2.0), FACTS)
        with pytest.raises(CheckpointError, match=f"{name}' exists already"):
            start_saving(tmp_path / name, contents_of(2.0), FACTS)
    assert values_of(tmp_path / "a") == {1.0}
    assert sorted(os.listdir(tmp_path)) == ["a", "file", "full", "link"]
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", contents_of(2.0), FACTS)  # as a user may have made it
    assert values_of(tmp_path / "empty") == {2.0}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (Contents(trees={"state": {"a": [1, object()]}}), r"^state\.a\[1\] is of type object, which can't be stored"),
        (
            Contents(weights={"model": {"w": torch.eye(2).to_sparse()}}),
            r"weight 'w' can't be stored: it has the layout",
        ),
        (Contents(trees={"manifest": 1}), r"'manifest' can't be the name of a part"),
        (Contents(trees={"../x": 1}), r"'../x' can't be the name of a part"),
        (Contents(trees={"model": 1}, weights={"model": {}}), r"model: a state and weights of one name"),
        (Contents(weights={"model": {"w": torch.ones(1)}}, max_shard_size="many"), r"size='many'. Expected a number"),
    ],
)
def test_nothing_is_written_of_what_can_not_be_stored(tmp_path: Path, contents: Contents, message: str) -> None:
    for save in (save_checkpoint, start_saving):
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "new" / "a", contents, FACTS)
    assert os.listdir(tmp_path) == []


def test_weights_that_are_tied_or_wrapped_or_odd_keep_their_semantics(tmp_path: Path) -> None:
    embed = nn.Embedding(5, 3)
    state = {"a.weight": embed.weight, "b.weight": embed.weight, "turned": torch.randn(2, 3).t(), "note": {"x": (1,)}}
    save_checkpoint(tmp_path / "a", Contents(weights={"model": state}), FACTS)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert sorted(stored) == ["a.weight", "turned"]
    weights = open_checkpoint(tmp_path / "a").weights()
    assert weights.aliases == {"b.weight": "a.weight"}
    assert weights["note"] == {"x": (1,)}
    assert torch.equal(weights["turned"], state["turned"])  # type: ignore[arg-type]


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process may become larger: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_b31_a_write_that_fails_leaves_the_checkpoints_before_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "10", contents_of(10.0), FACTS)
    with files_of_at_most(100_000):
        with pytest.raises(CheckpointError, match="can't be written: File too large") as caught:
            save_checkpoint(tmp_path / "20", contents_of(20.0, size=1_000_000), FACTS)
        pending = start_saving(tmp_path / "30", contents_of(30.0, size=1_000_000), FACTS)
        with pytest.raises(CheckpointError, match="can't be written: File too large"):
            pending.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["10"]
    assert pending.is_done and "File too large" in str(pending.error)
    assert values_of(tmp_path / "10") == {10.0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_seen_before_anything_is_written(small_disk: Path) -> None:
    save_checkpoint(small_disk / "10", contents_of(10.0, size=200_000), FACTS)
    with pytest.raises(CheckpointError, match=r"needs 8\.\d MB, and \d\.\d MB are free at .*Nothing was written"):
        save_checkpoint(small_disk / "20", contents_of(20.0, size=1_000_000), FACTS)
    (small_disk / "filler").write_bytes(bytes(1_500_000))
    with pytest.raises(CheckpointError, match=r"needs 1\.9 MB, and 1\.\d MB are free"):
        save_checkpoint(small_disk / "30", contents_of(30.0, size=200_000), FACTS)
    assert sorted(os.listdir(small_disk)) == ["10", "filler"]
    assert values_of(small_disk / "10") == {10.0}


def test_sizes_are_readable(tmp_path: Path) -> None:
    assert [readable(size) for size in (999, 1000, 604_200_000, 10**16)] == [
        "999 bytes",
        "1.0 kB",
        "604.2 MB",
        "10000.0 TB",
    ]
    check_space(tmp_path / "not" / "there", 1)
    with pytest.raises(CheckpointError, match=r"needs 1000000.0 TB"):
        check_space(tmp_path / "not" / "there", 10**18)


def test_a_path_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = {
        tmp_path / "file" / "a": "File exists",
        tmp_path / "file" / "b" / "a": "Not a directory",
        Path("/proc/loopwright/a"): "No such file or directory",
    }
    places[tmp_path / ("n" * 250)] = "File name too long"
    for place, reason in places.items():
        with pytest.raises(CheckpointError, match=f"can't be written: {reason}.*No checkpoint was made"):
            save_checkpoint(place, contents_of(1.0), FACTS)


def test_a_read_only_disk_is_named_and_can_be_read(small_disk: Path) -> None:
    save_checkpoint(small_disk / "a", contents_of(1.0), FACTS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="can't be written: Read-only file system"):
        save_checkpoint(small_disk / "b", contents_of(1.0), FACTS)
    assert values_of(small_disk / "a") == {1.0}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o500)
    with pytest.raises(CheckpointError, match="can't be written: Permission denied"):
        save_checkpoint(folder / "a", contents_of(1.0), FACTS)
    folder.chmod(0o700)


def test_leftovers_of_dead_saves_are_swept_and_living_ones_stay(tmp_path: Path) -> None:
    from loopwright.distributed.atomic import PartialFolder

    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    living = PartialFolder(tmp_path / "other")
    dead = living.path.with_name(living.path.name.replace(str(os.getpid()), str(child.pid)))
    dead.mkdir()
    (dead / "model.safetensors").write_text("half")
    elsewhere = tmp_path / ".c.elsewhere-1.partial"
    elsewhere.mkdir()
    save_checkpoint(tmp_path / "a", contents_of(1.0), FACTS)
    assert sorted(os.listdir(tmp_path)) == sorted([".c.elsewhere-1.partial", living.path.name, "a"])
    assert newest(tmp_path) is not None
    living.discard()


def test_pain_20_a_background_save_holds_the_values_of_its_call(tmp_path: Path) -> None:
    weight = torch.full((300_000,), 1.0)
    exp_avg = weight.clone()
    previous = None
    for step in range(1, 6):
        weight.fill_(step)
        exp_avg.fill_(step)
        contents = Contents(trees={"optimizer": {"exp_avg": exp_avg}, "state": {"step": float(step)}})
        contents.weights = {"model": {"w": weight}}
        previous = start_saving(tmp_path / str(step), contents, FACTS, previous=previous)
        weight.fill_(-1)
        exp_avg.fill_(-1)
    assert previous is not None
    assert previous.wait() == tmp_path / "5"
    assert [values_of(tmp_path / str(step)) for step in range(1, 6)] == [{float(step)} for step in range(1, 6)]
    assert [open_checkpoint(tmp_path / str(step)).manifest.sequence for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_the_memory_of_a_background_save_is_used_again(tmp_path: Path) -> None:
    first = start_saving(tmp_path / "1", contents_of(1.0), FACTS)
    first.wait()
    before = [copy.data_ptr() for copy in first._copies._copies]
    second = start_saving(tmp_path / "2", contents_of(2.0), FACTS, previous=first)
    second.wait()
    assert [copy.data_ptr() for copy in second._copies._copies] == before
    third = start_saving(tmp_path / "3", contents_of(3.0, size=7), FACTS, previous=second)
    third.wait()
    assert [values_of(tmp_path / name) for name in "123"] == [{1.0}, {2.0}, {3.0}]


def test_a_second_background_save_waits_for_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="loopwright.checkpoint.saving"):
        first = start_saving(tmp_path / "1", contents_of(1.0, size=5_000_000), FACTS)
        second = start_saving(tmp_path / "2", contents_of(2.0), FACTS, previous=first)
        assert first.is_done
        second.wait()
    waited = [record.getMessage() for record in caplog.records if "waited" in record.getMessage()]
    assert len(waited) <= 1  # none where the first was quicker than the start of the second
    assert all(f"s for the save of {tmp_path / '1'} to end" in text for text in waited)


def test_a_background_save_that_failed_does_not_stop_the_next(tmp_path: Path) -> None:
    with files_of_at_most(10_000):
        first = start_saving(tmp_path / "1", contents_of(1.0, size=100_000), FACTS)
        with pytest.raises(CheckpointError, match="File too large"):
            first.wait()
    second = start_saving(tmp_path / "2", contents_of(2.0, size=100_000), FACTS, previous=first)
    assert second.wait() == tmp_path / "2"
    assert second.error is None
    assert os.listdir(tmp_path) == ["2"]


EXITING = """
import sys, torch
from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.saving import start_saving
start_saving(sys.argv[1], Contents(trees={"a": torch.ones(20_000_000)}), Facts())
"""


def test_the_end_of_the_program_waits_for_a_background_save(tmp_path: Path) -> None:
    assert nursery().run("-c", EXITING, str(tmp_path / "a"), timeout=60).returncode == 0
    assert open_checkpoint(tmp_path / "a").tree("a").sum() == 20_000_000


def test_two_threads_of_one_process_save_into_one_folder(tmp_path: Path) -> None:
    pending = [start_saving(tmp_path / str(index), contents_of(float(index)), FACTS) for index in range(4)]
    for each in pending:
        each.wait()
    assert [values_of(tmp_path / str(index)) for index in range(4)] == [{float(index)} for index in range(4)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loopwright-save")]


def peak_growth(act: Any) -> int:
    """By how many bytes the resident memory of this process grew at most."""
    peak = [0]
    done = threading.Event()

    def resident() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    before = resident()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act()
    finally:
        done.set()
        watcher.join()
    return peak[0]


def test_pain_22_saving_and_loading_take_little_more_memory(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {str(index): torch.ones(4_000_000) for index in range(12)}  # 16 MB each
    tensors["turned"] = torch.ones(2000, 2000).t()
    contents = Contents(
        trees={"optimizer": tensors}, weights={"model": {f"w{key}": value for key, value in tensors.items()}}
    )
    limit = 64 * 10**6
    assert peak_growth(lambda: save_checkpoint(tmp_path / "a", contents, FACTS)) < limit + 1.1 * 16_000_000
    checkpoint = open_checkpoint(tmp_path / "a", verify="sizes")
    module = nn.ParameterDict({f"w{key}": nn.Parameter(torch.zeros(value.shape)) for key, value in tensors.items()})
    assert peak_growth(lambda: checkpoint.load_weights_into(module)) < limit
    assert peak_growth(lambda: checkpoint.tree("optimizer", into=tensors)) < limit
    assert all(bool((weight == 1).all()) for weight in module.values())
