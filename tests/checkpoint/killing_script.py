"""Save checkpoints in a loop in children, kill each at some moment, and say what is left: `killing_script.py FOLDER`.

Importing torch takes seconds, a fork of a process that has it none: that is why this is a script of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.finding import newest
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.saving import save_checkpoint, start_saving

KILLS = int(sys.argv[2]) if len(sys.argv) > 2 else 12


def save_for_ever(folder: Path, first: int, acknowledged: Path, in_background: bool) -> None:
    previous = None
    for step in itertools.count(first):
        tensor = torch.full((200_000,), float(step))
        contents = Contents(
            trees={"state": {"step": step}, "optimizer": {"m": tensor}}, weights={"model": {"w": tensor}}
        )
        contents.max_shard_size = 300_000
        if in_background:
            previous = start_saving(
                folder / f"step-{step}", contents, Facts(progress={"step": step}), previous=previous
            )
            previous.wait()
        else:
            save_checkpoint(folder / f"step-{step}", contents, Facts(progress={"step": step}))
        acknowledged.write_text(str(step))


def await_save(acknowledged: Path, step: int) -> None:
    """Return when a step after this one is saved."""
    give_up = time.monotonic() + 30
    while int(acknowledged.read_text() or 0) <= step:
        assert time.monotonic() < give_up
        time.sleep(0.001)


def check(folder: Path, acknowledged: int) -> int:
    """The step of the newest checkpoint, all of whose values belong to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged
        found = newest(folder)
    if found is None:
        assert acknowledged == 0
        return 0
    step = int(found.tree("state")["step"])
    values = [found.tree("optimizer")["m"], *found.weights().values()]
    assert all(bool((value == step).all()) for value in values), f"{found} mixes steps"
    assert step >= acknowledged, f"step {acknowledged} was committed, and the newest is {step}"
    return step


def main(folder: Path) -> None:
    draw = random.Random(0)
    acknowledged = folder.with_name("acknowledged")
    acknowledged.write_text("0")
    step = 0
    for number in range(KILLS):
        child = os.fork()
        if child == 0:
            save_for_ever(folder, step + 1, acknowledged, in_background=number % 2 == 1)
        await_save(acknowledged, step)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = check(folder, int(acknowledged.read_text() or step))
    save_checkpoint(folder / "last", Contents(), Facts())
    hidden = [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    print(f"kills {KILLS}, newest step {step}, leftovers {len(hidden)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
