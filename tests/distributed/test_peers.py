"""Scripts that start their own other processes, run for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright import ConfigError
from loopwright.distributed.peers import start_peers

from ..nursery import nursery

SCRIPT = """
import sys, threading, time
import torch
import torch.distributed as dist
from loopwright.distributed.group import connect, disconnect
from loopwright.distributed.launched import find_place
from loopwright.distributed.peers import start_peers

def main():
    word, place, init_method = sys.argv[1], find_place(), None
    if word == "early" and place.process_index == 1:
        raise ValueError("early")
    if word == "absent" and place.process_index == 1:
        return
    if place.num_processes == 1:
        found = []  # in a thread that ends before the processes do, as a Trainer may be called
        thread = threading.Thread(target=lambda: found.append(start_peers(2)))
        thread.start()
        thread.join()
        peers = found[0]
        place, init_method = peers.place, peers.init_method
    connect(place, torch.device("cpu"), init_method=init_method)
    total = torch.tensor([place.process_index + 1.0])
    dist.all_reduce(total)
    print(f"{place.process_index} {total.item()} {sys.argv[1:]}\\n", end="", flush=True)  # one write
    if word == "exit" and place.process_index == 0:
        try:
            sys.exit(3)
        except SystemExit as error:
            peers.notice(error)  # as the Trainer does
            raise
    if word == "exit":
        time.sleep(1)
        sys.exit(1)
    if word == "parent" and place.process_index == 0:
        raise ValueError("of the parent")
    if word == "parent":
        time.sleep(60)
    disconnect()
    if word == "late" and place.process_index == 1:
        sys.exit(4)

if __name__ == "__main__":
    main()
"""


ARGUMENTS = ["late", "a 'b"]


def run(word: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a word, as a program that nobody launched."""
    Path("script.py").write_text(SCRIPT)
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: text for name, text in os.environ.items() if name not in launched}
    if arguments[0] == "script.py":
        return nursery().run(*arguments, word, "a 'b", timeout=60, env=environment)
    command = [sys.executable, *arguments, word, "a 'b"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_the_script_runs_again_as_process_1_and_its_failure_is_that_of_the_run() -> None:
    ended = run("late", "-m", "script")
    assert sorted(ended.stdout.splitlines()) == [f"{index} 3.0 {ARGUMENTS}" for index in (0, 1)]
    assert "process 1 of 2 failed (exit code 4)" in ended.stderr
    assert ended.returncode == 4


def test_a_failure_before_the_processes_have_met_ends_the_wait() -> None:
    begin = time.monotonic()
    ended = run("early", "script.py")
    assert time.monotonic() - begin < 30
    assert ended.returncode == 1
    assert "ValueError: early" in ended.stderr
    assert "process 1 of 2 failed (exit code 1); see its output above. Process 0 was waiting for it" in ended.stderr


def test_a_process_that_ends_before_it_met_the_others_is_not_waited_for() -> None:
    begin = time.monotonic()
    ended = run("absent", "script.py")
    assert time.monotonic() - begin < 30
    assert ended.returncode == 1
    assert "process 1 of 2 ended in order, but before it met the others" in ended.stderr


def test_the_code_of_process_0_is_that_of_the_run_where_it_ends_first() -> None:
    ended = run("exit", "script.py")
    assert (ended.returncode, "process 0 ended first (exit code 3)." in ended.stderr) == (3, True)


def test_a_failure_of_process_0_ends_the_others() -> None:
    begin = time.monotonic()
    ended = run("parent", "script.py")
    assert time.monotonic() - begin < 30  # process 1 would sleep for a minute
    assert ended.returncode == 1
    assert "ValueError: of the parent" in ended.stderr


def test_a_test_can_not_be_started_again() -> None:
    with pytest.raises(
        ConfigError, match=r"this is a run of pytest.*launch --num_processes 2 script\.py.*notebook_lau"
    ):
        start_peers(2)


def test_code_without_a_file_can_not_be_started_again() -> None:
    command = "from loopwright.distributed.peers import start_peers; start_peers(2)"
    ended = nursery().run("-c", command, timeout=60)
    assert "ConfigError: 2 processes are wanted, but this is code without a file" in ended.stderr
