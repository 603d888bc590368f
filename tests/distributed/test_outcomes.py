"""Which of several failures is the first cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from loopwright.distributed.errors import PeerFailedError
from loopwright.distributed.outcomes import ending_of, first_cause, record_failure


def failure(index: int, code: int, error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> ProcessFailure:
    """What torch's agent knows of a process that ended with a code, after recording an error."""
    file = Path(f"error-{index}.json")
    if error is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        record_failure(error)
        record_failure(RuntimeError("while it cleans up"))  # the first one stands
    return ProcessFailure(local_rank=index, pid=1, exitcode=code, error_file=str(file))


def test_who_failed_because_another_one_did_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {
        0: failure(0, 1, PeerFailedError("process 1 failed"), monkeypatch),
        1: failure(1, 1, ValueError("boom\nmore"), monkeypatch),
        2: failure(2, -15, None, monkeypatch),
        3: failure(3, 1, None, monkeypatch),
    }
    outcome = first_cause(failures, 4)
    assert outcome.text == ("process 1 of 4 failed first: ValueError: boom ... (exit code 1). After it ended: 0, 3.")
    assert outcome.exit_code == 1
    assert outcome.traceback == "ValueError: boom\nmore\n"


def test_a_kill_is_the_cause_where_the_others_only_noticed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {0: failure(0, 1, PeerFailedError("gone"), monkeypatch), 1: failure(1, -9, None, monkeypatch)}
    outcome = first_cause(failures, 2)
    assert outcome.text.startswith("process 1 of 2 failed first: killed by SIGKILL, as the system does when memory")
    assert outcome.exit_code == 137


def test_the_exit_code_is_the_causes_own_where_the_launcher_ended_it_on_its_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, code in (
        (ValueError("boom"), 1),
        (SystemExit(3), 3),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 130),
    ):
        Path("error-1.json").unlink(missing_ok=True)
        failures = {0: failure(0, 1, PeerFailedError("gone"), monkeypatch), 1: failure(1, -15, error, monkeypatch)}
        outcome = first_cause(failures, 2)
        assert outcome.exit_code == code
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        assert outcome.text == f"process 1 of 2 failed first: {told} (exit code {code}). After it ended: 0."


def test_a_process_that_was_ended_in_order_is_the_cause_only_among_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error-1.json")
    record_failure(SystemExit(143), "SIGTERM asked it to end")
    ended = failure(1, 143, None, monkeypatch)
    text = first_cause({0: failure(0, 143, None, monkeypatch), 1: ended}, 2).text
    assert text == "process 1 of 2 failed first: SIGTERM asked it to end (exit code 143). After it ended: 0."
    assert first_cause({0: failure(0, 3, None, monkeypatch), 1: ended}, 2).exit_code == 3  # the launcher ended 1 then


def test_record_is_of_torchs_form(monkeypatch: pytest.MonkeyPatch) -> None:
    failure(0, 1, ValueError("boom"), monkeypatch)
    told = json.loads(Path("error-0.json").read_text())["message"]
    assert told["message"] == "ValueError: boom"
    assert {"py_callstack", "timestamp"} <= set(told["extraInfo"])


def test_without_a_launcher_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    record_failure(ValueError("boom"))
    assert list(Path.cwd().iterdir()) == []


def test_endings_in_words() -> None:
    assert [ending_of(code) for code in (3, -11, -999)] == ["exit code 3", "killed by SIGSEGV", "killed by signal 999"]
