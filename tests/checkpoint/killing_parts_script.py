"""Two processes save their parts in a loop; one of them is killed at some moment, and what is left is looked at.

`killing_parts_script.py FOLDER KILLS`. Importing torch takes seconds, a fork of a process that has it none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.finding import newest
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.saving import PendingSave, save_checkpoint, start_saving
from loopwright.distributed.errors import CheckpointError

ROWS = 100_001  # an odd number: the parts differ in length


def save_for_ever(folder: Path, rank: int, first: int, acknowledged: Path, in_background: bool) -> None:
    meeting = folder.with_name(f"meeting-{first}")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    previous: PendingSave | None = None
    for step in itertools.count(first):
        size = (ROWS + 1) // 2 if rank == 0 else ROWS // 2
        local = torch.full((size, 2), float(step))
        value: Any = DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, 2), stride=(2, 1))
        contents = Contents(shared_trees={"optimizer": {"m": value, "step": step}}, weights={"model": {"w": value}})
        path, facts = folder / f"step-{step}", Facts(progress={"step": step})
        if in_background:
            previous = start_saving(path, contents, facts, previous=previous)
            previous.wait()
        else:
            save_checkpoint(path, contents, facts)
        if rank == 0:
            acknowledged.write_text(str(step))


def in_child(folder: Path, rank: int, first: int, acknowledged: Path, in_background: bool) -> int:
    child = os.fork()
    if child == 0:
        # The other process is gone: a save fails, or its collective does.
        with contextlib.suppress(CheckpointError, RuntimeError):
            save_for_ever(folder, rank, first, acknowledged, in_background)
        os._exit(0)
    return child


def check(folder: Path, acknowledged: int) -> int:
    """The step of the newest checkpoint, all of whose values belong to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged
        found = newest(folder)
    assert found is not None
    tree = found.tree("optimizer")
    values = [tree["m"], *found.weights().values()]
    assert all(value.shape == (ROWS, 2) and bool((value == tree["step"]).all()) for value in values), found
    assert tree["step"] >= acknowledged, f"step {acknowledged} was committed, and the newest is {tree['step']}"
    return int(tree["step"])


def main(folder: Path, kills: int) -> None:
    draw, step = random.Random(1), 0
    acknowledged = folder.with_name("acknowledged")
    for number in range(kills):
        acknowledged.write_text("0")
        children = [in_child(folder, rank, step + 1, acknowledged, number % 2 == 1) for rank in range(2)]
        give_up = time.monotonic() + 30
        while not int(acknowledged.read_text() or 0):
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(children[number // 2 % 2], signal.SIGKILL)
        time.sleep(0.2)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        step = check(folder, int(acknowledged.read_text() or 0))
    save_checkpoint(folder / "last", Contents(), Facts())
    hidden = [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    print(f"kills {kills}, newest step {step}, leftovers {len(hidden)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
