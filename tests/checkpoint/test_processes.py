"""Several processes save one checkpoint: all of it, or none."""

from __future__ import annotations

import functools
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.meeting import BackgroundMeeting, ForegroundMeeting, together
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.saving import save_checkpoint, start_saving
from loopwright.distributed.errors import CheckpointError
from loopwright.distributed.group import rank


def contents_of(size: int = 1000) -> Contents:
    """Each process's own tree, and on the main process what is common."""
    trees: dict[str, Any] = {f"process-{rank():05}": {"draws": torch.full((size,), float(rank())), "rank": rank()}}
    if rank() != 0:
        return Contents(trees=trees)
    return Contents(trees={**trees, "state": {"step": 5}}, weights={"model": {"w": torch.ones(size)}})


def failing(name: str) -> Contents:
    """What can't be saved, for one reason each, on process 1."""
    contents = contents_of()
    if rank() == 1 and name == "type":
        contents.trees = {"process-00001": {"a": [object()]}}
    elif rank() == 1 and name == "name":
        contents.trees = {"process-00000": {}}
    elif name == "weights":
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(5), mesh, [Shard(0)])
        if rank() == 1:
            contents.weights = {"model": {"w": part}}
    return contents


def text_of(act: Any) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_both_ways(folder: str) -> list[str]:
    path = Path(folder)
    facts = Facts(world_size=2, progress={"step": 5})
    save_checkpoint(path / "a", contents_of(), facts)
    pending = start_saving(path / "b", contents_of(), facts)
    # The main thread may be in collectives meanwhile.
    total = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(total)
    pending = start_saving(path / "c", contents_of(), facts, previous=pending)
    pending.wait()
    found = []
    for name in "abc":
        checkpoint = open_checkpoint(path / name)
        own = checkpoint.tree(f"process-{rank():05}")
        found.append(f"{own['rank']} {own['draws'].unique().tolist()} {checkpoint.tree('state')['step']}")
    return found


def test_two_processes_save_together_also_in_the_background(two_processes: Any, tmp_path: Path) -> None:
    assert two_processes(save_both_ways, str(tmp_path)) == [["0 [0.0] 5"] * 3, ["1 [1.0] 5"] * 3]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    checkpoint = open_checkpoint(tmp_path / "a")  # by one process alone
    assert checkpoint.tree_names == ("process-00000", "process-00001", "state")
    assert checkpoint.manifest.world_size == 2
    assert [open_checkpoint(tmp_path / name).manifest.sequence for name in "abc"] == [1, 2, 3]


def fail_in_all_ways(folder: str) -> list[str]:
    path = Path(folder) / "a"
    facts = Facts(world_size=2)
    texts = []
    for name in ("type", "name", "weights"):
        contents = failing(name)
        texts.append(text_of(functools.partial(save_checkpoint, path, contents, facts)))
    texts.append(text_of(lambda: start_saving(path, failing("type"), facts)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        texts.append(text_of(lambda: save_checkpoint(path, contents_of(), facts)))
        texts.append(text_of(lambda: start_saving(path, contents_of(), facts).wait()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank() == 0:
        path.write_text("taken")
    dist.barrier()
    texts.append(text_of(lambda: save_checkpoint(path, contents_of(), facts)))
    return texts


def test_the_failure_of_one_is_the_same_error_on_all_and_nothing_is_left(two_processes: Any, tmp_path: Path) -> None:
    first, second = two_processes(fail_in_all_ways, str(tmp_path))
    assert first == second
    assert first[0].startswith("process 1: process-00001.a[0] is of type object, which can't be stored")
    assert first[1] == ("several processes write the same files: process-00000.json. Give each tree its own name.")
    assert first[2].startswith("process 0: process 1 has parts of model, and the main process has none")
    assert first[3] == first[0]
    assert first[4].startswith("process 1: the checkpoint can't be written: File too large")
    assert first[5] == first[4]
    assert first[6].startswith(f"process 0: {str(tmp_path / 'a')!r} exists already")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "taken"


def keys_of_the_store() -> int:
    return int(dist.distributed_c10d._get_default_store().num_keys())


def meet_in_the_background() -> list[Any]:
    before = keys_of_the_store()
    meeting = BackgroundMeeting(timeout_seconds=1.0)
    gathered = meeting.gather({"rank": rank()}, "a test")
    failed = text_of(lambda: together(meeting, "a test", lambda: 1 / (1 - rank())))
    meeting.close()
    dist.barrier()
    left = keys_of_the_store() - before
    late = BackgroundMeeting(timeout_seconds=0.3)
    began = time.monotonic()
    lonely = text_of(lambda: late.gather(1, "a test")) if rank() == 0 else ""
    is_quick = time.monotonic() - began < 20
    together(ForegroundMeeting(), "a test", lambda: None)
    late.close()
    return [gathered, failed, left, lonely, is_quick]


def test_processes_meet_in_the_background_and_leave_nothing_in_the_store(two_processes: Any) -> None:
    first, second = two_processes(meet_in_the_background)
    assert first[0] == second[0] == [{"rank": 0}, {"rank": 1}]
    assert first[1] == second[1] == "process 1: ZeroDivisionError: division by zero. No checkpoint was made."
    assert first[2] <= 2  # a count of the meetings of each process, whatever their number
    assert first[3] == "a test: process 1 did not answer in 0.3 s. Nothing was saved."
    assert first[4] and second[4]


def test_one_process_needs_no_other() -> None:
    meeting = BackgroundMeeting(timeout_seconds=0.1)
    assert meeting.gather(1, "a test") == [1]
    meeting.close()
