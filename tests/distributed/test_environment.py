"""Environment variables, sizes, the logger, the progress bar."""

from __future__ import annotations

import io
import logging
import os

import pytest
import torch

from loopwright.distributed.environment import (
    FALSE_WORDS,
    TRUE_WORDS,
    VARIABLES,
    clear_environment,
    get_int_from_env,
    launched_as,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    read_boolean,
    read_flag,
    read_int,
    read_text,
    str_to_bool,
    variable_names,
)
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.logger import get_logger
from loopwright.distributed.progress import tqdm
from loopwright.distributed.units import convert_file_size_to_int, size_bytes


def test_our_own_name_comes_before_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_text("MIXED_PRECISION") is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert read_text("MIXED_PRECISION") == "fp16"
    monkeypatch.setenv("LOOPWRIGHT_MIXED_PRECISION", " bf16 ")
    assert read_text("MIXED_PRECISION") == "bf16"
    monkeypatch.setenv("LOOPWRIGHT_MIXED_PRECISION", "")
    assert read_text("MIXED_PRECISION") == "fp16"


def test_every_variable_is_in_the_table_with_what_it_does() -> None:
    assert all(VARIABLES.values())
    with pytest.raises(AssertionError, match="MIXED_PRECISON"):
        read_text("MIXED_PRECISON")
    assert {"LOOPWRIGHT_USE_CPU", "ACCELERATE_USE_CPU", "RANK"} < set(variable_names())
    assert "USE_CPU" not in variable_names()


def test_numbers_and_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_int("GRADIENT_ACCUMULATION_STEPS"), read_flag("USE_CPU"), launched_as("RANK", 5)) == (None, None, 5)
    monkeypatch.setenv("LOOPWRIGHT_GRADIENT_ACCUMULATION_STEPS", "12")
    monkeypatch.setenv("LOOPWRIGHT_USE_CPU", "Yes")
    monkeypatch.setenv("RANK", "3")
    assert (read_int("GRADIENT_ACCUMULATION_STEPS"), read_flag("USE_CPU"), launched_as("RANK", 5)) == (12, True, 3)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match=r"RANK='first' is not an integer"):
        launched_as("RANK", 0)


@pytest.mark.parametrize("text", ["y", "Yes", "t", "TRUE", "on", "1"])
def test_words_for_true(text: str) -> None:
    assert str_to_bool(text) == 1


@pytest.mark.parametrize("text", ["n", "No", "f", "FALSE", "off", "0"])
def test_words_for_false(text: str) -> None:
    assert str_to_bool(text) == 0


def test_every_word_is_true_or_false_in_any_case() -> None:
    assert set(TRUE_WORDS).isdisjoint(FALSE_WORDS)
    for word in (*TRUE_WORDS, *FALSE_WORDS):
        for text in (word, word.upper(), f" {word.title()} "):
            assert read_boolean(text) is (word in TRUE_WORDS)
    assert [read_boolean(text) for text in ("", "ja", "10", "none")] == [None] * 4


def test_other_words_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"value='ture' is neither true nor false\. Did you mean 'true'\?"):
        str_to_bool("ture")


def test_variables_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse_flag_from_env("MINE", True), parse_choice_from_env("MINE"), get_int_from_env(["MINE"], 4)) == (
        True,
        "no",
        4,
    )
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("OTHER", "-1")
    assert (parse_flag_from_env("MINE"), parse_choice_from_env("MINE")) == (True, "1")
    assert get_int_from_env(["OTHER", "MINE"], 4) == 1


def test_patched_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "1")

    def look() -> None:
        with patch_environment(before=2, during="x"):
            assert (os.environ["BEFORE"], os.environ["DURING"]) == ("2", "x")
            raise LookupError("out")

    with pytest.raises(LookupError, match="out"):
        look()
    assert (os.environ["BEFORE"], "DURING" in os.environ) == ("1", False)
    with clear_environment():
        assert dict(os.environ) == {}
        os.environ["DURING"] = "x"
    assert (os.environ["BEFORE"], "DURING" in os.environ) == ("1", False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5MB", 5_000_000),
        ("5MiB", 5_242_880),
        ("1.5GB", 1_500_000_000),
        ("5Mb", 625_000),
        ("10KiB", 10_240),
        ("5mb", 5_000_000),
        ("900B", 900),
        (" 3 GB ", 3_000_000_000),
        ("17", 17),
        (12, 12),
        (0, 0),
    ],
)
def test_f48_sizes(text: int | str, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["abc", -5, "-5MB", "5XB", "MB", True, None, 1.5])
def test_f48_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match=r"size=.*\. Expected a number of bytes, or text such as '500MB'"):
        convert_file_size_to_int(text)  # type: ignore[arg-type]


def test_sizes_of_tensors_count_elements_of_any_device_and_layout() -> None:
    tensors = [torch.zeros(3, 2), torch.zeros(5, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)]
    assert size_bytes([*tensors, torch.zeros(1000, device="meta"), torch.zeros(4, 1).expand(4, 9)]) == (
        6 * 4 + 5 * 2 + 8 + 1000 * 4 + 36 * 4
    )
    assert size_bytes([]) == 0


def test_messages_come_from_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("loopwright.tests.line", log_level="info")
    logger.info("one %d", 1, main_process_only=True)
    logger.log(logging.WARNING, "two", in_order=True, extra={"own": 3})
    logger.debug("not shown")
    assert caplog.messages == ["one 1", "two"]
    assert {record.funcName for record in caplog.records} == {"test_messages_come_from_the_callers_line"}
    assert caplog.records[1].own == 3  # type: ignore[attr-defined]


def test_only_the_main_process_writes_unless_all_shall(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger("loopwright.tests.ranks", log_level=logging.INFO)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger.info("main")
    logger.info("all", main_process_only=False)
    assert caplog.messages == ["[RANK 1] all"]


def test_a_warning_may_be_given_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("loopwright.tests.once")
    for _ in range(2):
        logger.warning_once("again %s", "a")
        logger.warning_once("again %s", "b")
    assert caplog.messages == ["again a", "again b"]
    assert caplog.records[0].funcName == "test_a_warning_may_be_given_once"


def test_the_level_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("loopwright.tests.level").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    root = logging.root.level
    assert get_logger("loopwright.tests.level").logger.level == logging.DEBUG
    assert get_logger("loopwright.tests.level", "ERROR").logger.level == logging.ERROR
    assert logging.root.level == root


def test_the_bar_is_shown_by_the_main_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, hidden = io.StringIO(), io.StringIO()
    assert list(tqdm(range(2), file=shown)) == [0, 1]
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert list(tqdm(range(2), file=hidden)) == [0, 1]
    assert "2/2" in shown.getvalue()
    assert hidden.getvalue() == ""
    assert list(tqdm(range(2), main_process_only=False, file=hidden)) == [0, 1]
    assert "2/2" in hidden.getvalue()
    with pytest.raises(ConfigError, match=r"tqdm\(True, \.\.\.\): the first argument is what to iterate"):
        tqdm(True, range(2))
