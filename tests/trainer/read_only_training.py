"""A training whose folder of checkpoints becomes read-only, for a user who is not root; prints what was left of it.

Root may write everywhere: a process of root becomes somebody else here, which is why this is a script of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from loopwright.distributed.errors import CheckpointError
from tests.trainer.test_resume_faults import Calls, leg

NOBODY = 65534


def main(folder: Path) -> None:
    os.chmod(folder, 0o777)
    os.chdir(folder)
    expected, _ = leg(folder / "whole")  # imports all that is needed
    if os.geteuid() == 0:
        try:
            os.seteuid(NOBODY)
        except OSError as error:
            print(f"skipped: root can't become another user here: {error}")
            return
    saved = folder / "saved"
    try:
        leg(saved, Calls(saved, lambda: saved.chmod(0o500)))
    except CheckpointError as error:
        print(str(error).replace("\n", " "))
    print(sorted(os.listdir(saved)))
    saved.chmod(0o700)
    found, resumed_step = leg(saved, resume_from="latest")
    print(resumed_step, torch.equal(found, expected), sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        try:
            main(Path(place))
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            os.chdir("/")
