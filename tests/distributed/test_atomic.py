"""Files and folders appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.checkpoint.atomic import is_partial, remove_leftovers, whole_file, whole_folder
from loopwright.distributed.errors import CheckpointError

WRITER = """
import sys, time
from loopwright.checkpoint.atomic import whole_file
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
        assert is_partial(temporary)
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


def test_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    with whole_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["step-3"]


def test_folder_disappears_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), whole_folder(tmp_path / "step-3") as temporary:
        (temporary / "a").write_text("1")
        raise ValueError("no")
    assert os.listdir(tmp_path) == []


def test_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"), whole_folder(tmp_path):
        pass


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    host = socket.gethostname()
    dead_file = tmp_path / f".last.safetensors.{host}-{child.pid}.partial"
    dead_folder = tmp_path / f".step-1.{host}-{child.pid}.partial"
    dead_file.write_text("half")
    (dead_folder / "sub").mkdir(parents=True)
    kept = [f".a.{host}-{os.getppid()}.partial", ".a.elsewhere-1.partial", ".hidden", "a.partial"]
    for name in kept:
        (tmp_path / name).write_text("")
    assert sorted(remove_leftovers(tmp_path)) == sorted([dead_file, dead_folder])
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_leftover_of_an_earlier_process_with_this_number_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".step-1.{socket.gethostname()}-{os.getpid()}.partial" / "old").mkdir(parents=True)
    with whole_folder(tmp_path / "step-1") as temporary:
        (temporary / "a").write_text("1")
    assert os.listdir(tmp_path / "step-1") == ["a"]


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
