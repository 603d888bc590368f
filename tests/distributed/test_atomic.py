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

from loopwright.distributed.atomic import PartialFolder, _exchange_in_turn, move_into, remove_leftovers, whole_file
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


def test_folder_appears_when_it_is_committed(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "new" / "a")
    (folder.path / "file").write_text("content")
    assert os.listdir(tmp_path / "new") == [f".a.{HOST}-{os.getpid()}.partial"]
    assert folder.commit() == tmp_path / "new" / "a"
    assert os.listdir(tmp_path / "new") == ["a"]
    assert (tmp_path / "new" / "a" / "file").read_text() == "content"


def test_folder_that_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "a")
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").write_text("half")
    folder.discard()
    folder.discard()
    assert os.listdir(tmp_path) == []


def test_folder_does_not_take_the_place_of_what_came_meanwhile(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "theirs").write_text("")
    with pytest.raises(CheckpointError, match="a' exists already, and nothing that exists is overwritten"):
        folder.commit()
    folder.discard()
    assert os.listdir(tmp_path / "a") == ["theirs"]


def test_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """At one moment: whoever looks finds the one or the other. An empty folder is in nobody's way."""
    (tmp_path / "a").mkdir()
    for text in ("first", "second"):
        folder = PartialFolder(tmp_path / "a", replaces=True)
        (folder.path / text).write_text(text)
        folder.commit()
        assert (os.listdir(tmp_path), os.listdir(tmp_path / "a")) == (["a"], [text])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file' exists already"):
        PartialFolder(tmp_path / "file", replaces=True)


def test_folders_change_places_where_the_system_can_not_do_it_at_once(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    _exchange_in_turn(tmp_path / "new", tmp_path / "old")
    assert (os.listdir(tmp_path / "old"), os.listdir(tmp_path / "new")) == (["new"], ["old"])
    (tmp_path / "old.replaced").mkdir()
    with pytest.raises(CheckpointError, match=r"old\.replaced' is in the way"):
        _exchange_in_turn(tmp_path / "new", tmp_path / "old")
    assert (os.listdir(tmp_path / "old"), os.listdir(tmp_path / "new")) == (["new"], ["old"])


def test_what_is_in_a_folder_moves_into_another(tmp_path: Path) -> None:
    (tmp_path / "from" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "from" / "deep" / "er" / "file").write_text("content")
    (tmp_path / "from" / "taken").write_text("new")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "taken").write_text("old")
    with pytest.raises(CheckpointError, match="'taken' is a file of the checkpoint itself"):
        move_into(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "deep" / "er" / "file").read_text() == "content"
    assert (tmp_path / "to" / "taken").read_text() == "old"


def test_leftover_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    dead = tmp_path / f".step-1.{HOST}-{child.pid}.partial"
    (dead / "inner").mkdir(parents=True)
    (dead / "inner" / "file").write_text("half")
    own = tmp_path / f".a.{HOST}-{os.getpid()}.partial"  # of an earlier process with this number
    own.mkdir()
    (own / "old").write_text("half")
    folder = PartialFolder(tmp_path / "a")
    assert os.listdir(tmp_path) == [own.name]
    assert list(folder.path.iterdir()) == []
    folder.discard()
