"""A process that is killed while it saves leaves whole checkpoints, and what it had said to be saved is there."""

from __future__ import annotations

import re
from pathlib import Path

from ..nursery import nursery

SCRIPT = Path(__file__).with_name("killing_script.py")


def test_b29_kills_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = nursery().run(SCRIPT, str(folder), "16", timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"kills 16, newest step (\d+), leftovers 0\n", done.stdout)
    assert found is not None and int(found[1]) >= 16, done.stdout


def test_a_kill_of_one_process_while_all_write_their_parts(tmp_path: Path) -> None:
    script, folder = SCRIPT.with_name("killing_parts_script.py"), tmp_path / "checkpoints"
    done = nursery().run(script, str(folder), "4", timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"kills 4, newest step (\d+), leftovers 0\n", done.stdout)
    assert found is not None and int(found[1]) >= 4, done.stdout
