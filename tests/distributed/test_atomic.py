"""Files appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.distributed.atomic import remove_leftovers, whole_file
from loopwright.distributed.errors import CheckpointError

HOST = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())
WRITER = """
import sys, time
from loopwright.distributed.atomic import whole_file
for number in range(10**9):
    with whole_file(sys.argv[1]) as temporary:
        with open(temporary, "w") as file:
            for _ in range(200):
                file.write(f"{number} ")
                file.flush()
"""


def test_file_replaces_the_older_one_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "weights"
    target.parent.mkdir()
    target.write_text("old")
    with whole_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.name == f".weights.{HOST}-{os.getpid()}.partial"
    assert target.read_text() == "new"
    assert os.listdir(target.parent) == ["weights"]


def test_file_keeps_the_older_one_when_the_body_fails(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    target.write_text("old")
    with pytest.raises(OSError, match="disk full"), whole_file(target) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["weights"]


def test_file_that_was_not_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was written for"), whole_file(tmp_path / "weights"):
        pass


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    dead = tmp_path / f".last.safetensors.{HOST}-{child.pid}.partial"
    kept = [f".a.{HOST}-{os.getppid()}.partial", ".a.elsewhere-1.partial", ".hidden", "a.partial"]
    for name in (dead.name, *kept):
        (tmp_path / name).write_text("half")
    assert remove_leftovers(tmp_path) == [dead]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_leftover_of_an_earlier_process_with_this_number_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".weights.{HOST}-{os.getpid()}.partial").write_text("old")
    with whole_file(tmp_path / "weights") as temporary:
        assert not temporary.exists()
        temporary.write_text("new")
    assert os.listdir(tmp_path) == ["weights"]


def test_kill_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    for wait in (0.0, 0.003, 0.007, 0.013):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)])
        before = target.stat().st_mtime_ns if target.exists() else 0
        give_up = time.monotonic() + 60
        while not target.exists() or target.stat().st_mtime_ns == before:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
        words = target.read_text().split()
        assert len(words) == 200
        assert len(set(words)) == 1
    with whole_file(target) as temporary:
        temporary.write_text("after")
    assert os.listdir(tmp_path) == ["weights"]
