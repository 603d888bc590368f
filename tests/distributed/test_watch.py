"""Failures that processes survive, on three of them; and what needs one process alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from loopwright.distributed import watch
from loopwright.distributed.board import Board
from loopwright.distributed.connections import Connections
from loopwright.distributed.errors import DataError
from loopwright.distributed.failures import Answer, Failure
from loopwright.distributed.positions import HERE
from loopwright.distributed.reports import loss_report, timeout_report, waited_seconds
from loopwright.distributed.uncaught import EndHooks

from ..nursery import Child
from ..ports import free_port
from .failing import ended, start

# Those of one line follow each other; the lines go on at the same time, as most of it is waiting. The first of each
# leaves its processes time to meet.
SCENARIOS = (
    ("all_fail_alike", "one_leaves", "one_never_sends"),
    ("one_stays", "one_never_arrives"),
    ("one_leaves_memory", "one_stays_in_memory", "one_is_elsewhere"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of three processes saw in each scenario, process 0 first."""
    folder = tmp_path_factory.mktemp("survivable")
    processes: list[Child] = []
    for names in SCENARIOS:
        words = [word for name in names for word in (name, str(free_port()))]
        processes += start("survivable", *words, count=3, folder=folder)
    run = ended(processes)
    assert set(run.codes) == {0}, "\n".join(run.outputs + run.errors)
    found: dict[str, list[dict[str, Any]]] = {name: [] for names in SCENARIOS for name in names}
    for output in run.outputs:
        for line in map(json.loads, output.splitlines()):
            found[line["name"]].append(line)
    return found


def test_a_failure_of_all_leaves_the_group_intact(results: dict[str, list[dict[str, Any]]]) -> None:
    for found in results["all_fail_alike"]:
        assert not found["was_left"]
        assert found["first"]  # nothing is left of it for the next run
        assert found["returned"] == 3.0


def test_a_process_that_leaves_wakes_those_that_wait_for_it(results: dict[str, list[dict[str, Any]]]) -> None:
    first, left, last = results["one_leaves"]
    assert left["was_left"] and not left["is_connected"]
    for found in (first, last):
        assert found["type"] == "PeerFailedError"
        assert found["text"].startswith(
            "process 1 failed first, at one_leaves, outside any collective: ValueError: boom"
        )
        assert 'raise ValueError("boom")' in found["text"]
        assert "closed by peer" in found["cause"]
        assert found["left_too"]


def test_a_process_that_stays_does_not_hold_the_others(results: dict[str, list[dict[str, Any]]]) -> None:
    first, _, last = results["one_stays"]
    for index, found in ((0, first), (2, last)):
        assert found["type"] == "PeerFailedError"
        assert found["text"].startswith("process 1 failed first, at one_stays")
        assert f"Process {index} was in 'gather' with it." in found["text"]


def test_control_messages_end_with_a_process_that_fails(results: dict[str, list[dict[str, Any]]]) -> None:
    for scenario in ("one_leaves_memory", "one_stays_in_memory"):
        for index, found in enumerate(results[scenario]):
            if index != 1:
                assert found["type"] == "PeerFailedError"
                assert found["text"].startswith(f"process 1 failed first, at {scenario}, outside any collective: Value")
                assert f"Process {index} was in 'agree' with it." in found["text"]
                assert 'raise ValueError("boom")' in found["text"]
                assert "have left the shared memory" in found["cause"]
    assert results["one_leaves_memory"][1]["was_left"]


def test_a_control_message_that_never_comes_is_a_timeout(results: dict[str, list[dict[str, Any]]]) -> None:
    first, _, last = results["one_never_sends"]
    for found in (first, last):
        assert found["type"] == "CollectiveTimeoutError"
        assert "'agree' timed out after 2 s in process" in found["text"]
        assert "never arrived: process 1" in found["text"]
        assert "process 1: training_step, step 7, outside any collective" in found["text"]
        assert "process 0: training_step, step 7, in 'agree'" in found["text"]


def test_a_timeout_says_who_never_arrived_and_where_all_stand(results: dict[str, list[dict[str, Any]]]) -> None:
    first, _, last = results["one_never_arrives"]
    for found in (first, last):
        assert found["type"] == "CollectiveTimeoutError"
        assert "never arrived: process 1" in found["text"]
        assert "process 1: training_step, step 7, outside any collective" in found["text"]
        assert 'wait_for_others("arrives")' in found["text"]  # its stack
        assert "process 0: training_step, step 7, in 'gather'" in found["text"]
        assert "InitProcessGroupKwargs(timeout=...)" in found["text"]


def test_a_timeout_shows_operations_that_differ(results: dict[str, list[dict[str, Any]]]) -> None:
    first, other, last = results["one_is_elsewhere"]
    assert {found["type"] for found in (first, other, last)} == {"CollectiveTimeoutError"}
    for found in (first, other, last):
        assert "process 1: one_is_elsewhere, in 'broadcast'" in found["text"]
        assert "process 0: one_is_elsewhere, in 'gather'" in found["text"]


def test_without_a_group_nothing_is_said_or_changed() -> None:
    watch.announce_failure(ValueError("boom"))
    assert watch.first_failure() is None
    assert not watch.leave_group_after(ValueError("boom"))
    watch.stop_watch()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"), watch.collective("gather"):
        raise RuntimeError("Connection closed by peer")


def test_collective_records_where_the_process_is() -> None:
    watch.stand("training_step", 3)
    with watch.collective("backward"):
        with watch.collective("reduce"):
            assert str(HERE) == "training_step, step 3, in 'reduce'"
        assert HERE.operation == "backward"
        with pytest.raises(DataError, match="bad"), watch.collective("gather"):
            raise DataError("bad")
        assert HERE.operation == "backward"
    watch.stand("start")
    assert str(HERE) == "start, outside any collective"


def test_a_board_is_read_in_one_order_and_begins_anew_for_each_group() -> None:
    store = dist.HashStore()
    mine, other = Board(store, 0), Board(store, 1)
    assert mine.post(kind="alarm") == 0
    assert other.post(kind="failure", text="ü") == 1
    assert mine.post(kind="left") == 2
    expected = [(0, {"kind": "alarm"}), (1, {"kind": "failure", "text": "ü"}), (2, {"kind": "left"})]
    assert mine.read() == other.read() == expected
    assert mine.read() == []
    assert other.look_up("answer", 0, 1) is None
    mine.put("answer", 0, 1, text="here")
    assert other.look_up("answer", 0, 1) == "here"
    assert mine.count("read", 1, by=1) == other.count("read", 1) == 1
    mine.close()
    assert Board(store, 0).read() == []


def test_a_board_beside_another_has_entries_of_its_own_over_the_same_connection() -> None:
    board = Board(dist.HashStore(), 0)
    beside = board.beside("saves")
    beside.put("answer", text="whole")
    assert beside._store is board._store
    assert board.look_up("answer") is None
    board.close()
    assert beside.look_up("answer") == "whole"


def test_a_board_of_a_store_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.distributed.board.REACHING", timedelta(seconds=0.1))
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", held.port, is_master=False, timeout=timedelta(seconds=1800))
    del held
    with pytest.raises(RuntimeError, match=r"timed out after 100ms"):
        Board(store, 0)
    assert store.timeout == timedelta(seconds=1800)


def test_a_board_works_on_a_file() -> None:
    boards = [Board(dist.PrefixStore("group", dist.FileStore("store", 2)), index) for index in range(2)]
    for number, board in enumerate(boards):
        assert board.post(kind="alarm", index=number) == number
    assert (
        boards[0].read() == boards[1].read() == [(0, {"kind": "alarm", "index": 0}), (1, {"kind": "alarm", "index": 1})]
    )


def test_noted_connections_end_and_others_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        connections = Connections()
        user, user_end = pair(server)
        with connections.noting():
            noted, noted_end = pair(server)
            kept, kept_end = pair(store)
        with user, user_end, noted, noted_end, kept, kept_end:
            connections.close(store.getsockname()[1])
            noted.settimeout(5.0)
            assert noted.recv(1) == b""
            for near, far in ((user, user_end), (kept, kept_end)):
                far.sendall(b"x")
                assert near.recv(1) == b"x"


def pair(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    return near, far


def test_hooks_are_chained_and_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before, seen = sys.excepthook, []
    hooks = EndHooks(seen.append, lambda: None)
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    assert seen == [error]
    assert "ValueError: boom" in capsys.readouterr().err  # what was there before goes on working
    hooks.remove()
    assert sys.excepthook is before


def test_a_hook_below_another_one_falls_silent(capsys: pytest.CaptureFixture[str]) -> None:
    before, seen = sys.excepthook, []
    hooks = EndHooks(seen.append, lambda: None)
    below = sys.excepthook
    try:
        sys.excepthook = top = lambda *args: below(*args)
        hooks.remove()
        assert sys.excepthook is top
        sys.excepthook(ValueError, ValueError("boom"), None)
        assert seen == []
        assert "ValueError: boom" in capsys.readouterr().err
    finally:
        sys.excepthook = before


def test_hooks_are_silent_in_a_forked_process() -> None:
    seen: list[BaseException] = []
    hooks = EndHooks(seen.append, lambda: None)
    child = os.fork()
    if child == 0:
        os.close(2)
        sys.excepthook(ValueError, ValueError("boom"), None)
        os._exit(len(seen))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        hooks.remove()


def test_a_failure_carries_the_traceback_with_its_cause() -> None:
    try:
        try:
            raise KeyError("deep")
        except KeyError as cause:
            raise DataError("boom\nand more") from cause
    except DataError as error:
        failure = Failure.of(error, 3)
    assert failure.headline() == "process 3 failed first, at start, outside any collective: DataError: boom"
    assert "KeyError: 'deep'" in str(failure)
    assert not failure.is_consequence
    assert Failure(**json.loads(json.dumps(failure.as_dict()))) == failure


def test_an_answer_shows_the_main_threads_stack() -> None:
    answer = Answer.now(1)
    assert "test_an_answer_shows_the_main_threads_stack" in answer.stack
    assert answer.stack.rstrip().endswith("answer = Answer.now(1)")
    assert Answer.of(answer.to_text()) == answer


def test_reports_claim_what_is_known() -> None:
    here = Answer(0, "fit, in 'gather'", "gather", "  File here\n")
    there = Answer(1, "fit, in 'gather'", "gather", "  File there\n")
    text = timeout_report("gather", 0, 5.0, {0: here, 1: there}, 2, {})
    assert text.startswith("'gather' timed out after 5 s in process 0; all processes are in it.")
    assert "a different number of such calls" in text
    text = timeout_report("gather", 0, None, {0: here}, 4, {1: "on_fit_end"})
    assert text.startswith("'gather' timed out in process 0; never arrived: processes 1, 2, 3.")
    assert "process 1: its script has ended, or it has left the group, at on_fit_end" in text
    assert "process 2: does not answer" in text
    assert "All processes answer: the network" in loss_report("gather", 0, {0: here, 1: there}, 2, {}, False)
    text = loss_report("gather", 1, {}, 3, {0: "on_fit_end"}, True)
    assert "Its script has ended, or it has left the group: process 0." in text
    assert "The store that processes share can't be reached" in text
    assert "process 0: its script has ended, or it has left the group, at on_fit_end" in text
    assert "process 2" not in text  # nobody could ask it


@pytest.mark.parametrize(
    ("message", "timeout", "seconds"),
    [("Timed out waiting 1500ms for recv", None, 1.5), ("timed out", None, None), ("a timeout of 5000 ms", None, 5.0)],
)
def test_the_time_that_was_waited_is_torchs(message: str, timeout: Any, seconds: float | None) -> None:
    assert waited_seconds(message, timeout) == seconds


def test_a_process_that_is_to_end_does_so_where_nobody_reads_what_it_says() -> None:
    program = (
        "import os; from loopwright.distributed.uncaught import end_at_once; os.close(2); os.dup2(1, 2)\n"
        "try:\n    end_at_once('why', 7)\nfinally:\n    os._exit(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 7
