"""The grammar of intervals and durations, and when they are due."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from loopwright.callbacks.intervals import Duration, Interval, Schedule
from loopwright.callbacks.state import RunState
from loopwright.distributed.errors import ConfigError


def parse(value: Any, unit: Any = "steps") -> tuple[float, str]:
    duration = Duration.parse(value, unit=unit, option="every")
    return duration.amount, duration.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100 steps", (100, "steps")), ("1 step", (1, "steps")), ("100step", (100, "steps")), ("100", (100, "steps")),
        ("50 batches", (50, "batches")), ("1 batch", (1, "batches")),
        ("2 epochs", (2, "epochs")), ("0.25 epoch", (0.25, "epochs")), (".5 epoch", (0.5, "epochs")),
        ("5000 samples", (5000, "samples")), ("1 sample", (1, "samples")),
        ("1M tokens", (10**6, "tokens")), ("1 M tokens", (10**6, "tokens")), ("2.5B tokens", (2.5 * 10**9, "tokens")),
        ("10k steps", (10_000, "steps")), ("10K steps", (10_000, "steps")), ("1G tokens", (10**9, "tokens")),
        ("3T tokens", (3 * 10**12, "tokens")), ("1_000 steps", (1000, "steps")), ("1e3 steps", (1000, "steps")),
        ("1.5e3 samples", (1500, "samples")), ("  7 steps ", (7, "steps")),
        ("30 s", (30, "seconds")), ("30 sec", (30, "seconds")), ("30 seconds", (30, "seconds")),
        ("30 min", (1800, "seconds")), ("1.5 minutes", (90, "seconds")), ("2 h", (7200, "seconds")),
        ("0.5 hours", (1800, "seconds")), ("1 day", (86400, "seconds")),
    ],
)  # fmt: skip
def test_durations(text: str, expected: tuple[float, str]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (3, "steps", (3, "steps")), (2.5, "epochs", (2.5, "epochs")), (90, "seconds", (90, "seconds")),
        ("3", "epochs", (3, "epochs")), (datetime.timedelta(minutes=2), "steps", (120, "seconds")),
        (Duration(4, "tokens"), "steps", (4, "tokens")),
    ],
)  # fmt: skip
def test_what_is_not_text(value: Any, unit: Any, expected: tuple[float, str]) -> None:
    assert parse(value, unit) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "100 stpes",
            r"every='100 stpes' has an unknown unit 'stpes'. Did you mean 'steps'\? Accepted: batch, batches",
        ),
        ("steps", r"every='steps' can't be read. Expected a number and a unit: '100 steps'"),
        ("", r"every='' can't be read"),
        ("-5 steps", r"every='-5 steps' can't be read"),
        ("1,000 steps", r"every='1,000 steps' can't be read"),
        ("0 steps", r"every='0 steps': a duration of 0 steps is empty or endless. Expected a number above 0"),
        (0, r"every=0: a duration of 0 steps is empty"),
        (-1, r"every=-1: a duration of -1 steps is empty"),
        (float("inf"), r"every=inf: a duration of inf steps is empty or endless"),
        (float("nan"), r"every=nan: a duration of nan steps is empty or endless"),
        (2.5, r"every=2.5: 2.5 steps is not a whole number. Only epochs and times have fractions"),
        ("0.5 batches", r"every='0.5 batches': 0.5 batches is not a whole number"),
        (True, r"every=True is no duration. Expected a number of steps or a text such as '100 steps'"),
        (None, r"every=None is no duration"),
        ([1], r"every=\[1\] is no duration"),
        (datetime.timedelta(0), r"every=.*: a duration of 0 seconds is empty"),
    ],
)
def test_wrong_durations(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(value)


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (Duration(1, "epochs"), "1 epoch"), (Duration(2, "epochs"), "2 epochs"),
        (Duration(0.25, "epochs"), "0.25 epochs"),
        (Duration(1, "batches"), "1 batch"), (Duration(3, "batches"), "3 batches"), (Duration(1, "steps"), "1 step"),
        (Duration(10**6, "tokens"), "1000000 tokens"), (Duration(1.5, "seconds"), "1.5 seconds"),
    ],
)  # fmt: skip
def test_a_duration_in_words_is_read_back(duration: Duration, text: str) -> None:
    assert str(duration) == text
    assert Duration.parse(text, unit="steps", option="every") == duration


def interval(value: Any) -> Interval:
    return Interval.parse(value, unit="steps", option="every")


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        (None, Interval(), "never"),
        ("never", Interval(), "never"),
        (5, Interval((Duration(5, "steps"),)), "5 steps"),
        ("first", Interval(first=True), "first"),
        ("last", Interval(last=True), "last"),
        (["first", "2 epochs", 10, "last"], Interval((Duration(2, "epochs"), Duration(10, "steps")), True, True),
         "first, 2 epochs, 10 steps, last"),
        (("1 h",), Interval((Duration(3600, "seconds"),)), "3600 seconds"),
        ([Interval(first=True), "1 epoch"], Interval((Duration(1, "epochs"),), True), "first, 1 epoch"),
        (datetime.timedelta(seconds=5), Interval((Duration(5, "seconds"),)), "5 seconds"),
        ([], Interval(), "never"),
    ],
)  # fmt: skip
def test_intervals(value: Any, expected: Interval, text: str) -> None:
    assert interval(value) == expected
    assert str(interval(value)) == text
    assert interval(interval(value)) == expected
    assert interval(value).is_never == (text == "never")


def test_a_wrong_part_of_a_list_is_named() -> None:
    with pytest.raises(ConfigError, match=r"every='often' can't be read"):
        interval(["1 epoch", "often"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1 epoch", False), ("0.5 epoch", True), (["2 steps", "1.5 epochs"], True), ("30 min", False)],
)
def test_only_fractions_of_an_epoch_need_its_length(value: Any, expected: bool) -> None:
    assert interval(value).needs_epoch_length is expected


def due_steps(value: Any, *, steps: int = 12, per_epoch: int = 4, batches: int = 1, begin: int = 0) -> list[int]:
    """At which steps an interval is due; each step is so many batches of 2 samples and 10 tokens."""
    state = RunState(batches_per_epoch=per_epoch * batches)
    found = []
    advance(state, begin, batches, per_epoch)
    schedule = Schedule(interval(value), state)
    for _ in range(begin, steps):
        advance(state, 1, batches, per_epoch)
        if schedule.is_due(state):
            found.append(state.step)
    return found


def advance(state: RunState, steps: int, batches: int, per_epoch: int) -> None:
    for _ in range(steps):
        state.step += 1
        state.micro_step += batches
        state.samples += 2 * batches
        state.tokens += 10 * batches
        state.epoch, state.batch = divmod(state.step, per_epoch)[0], state.step % per_epoch * batches


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, [3, 6, 9, 12]), ("5 steps", [5, 10]), ("1 step", list(range(1, 13))), ("100 steps", []),
        ("1 epoch", [4, 8, 12]), ("0.5 epoch", [2, 4, 6, 8, 10, 12]), ("0.75 epoch", [3, 6, 9, 12]), ("3 epochs", [12]),
        ("7 samples", [4, 7, 11]), ("30 tokens", [3, 6, 9, 12]),
        ("first", [1]), ("last", []), (["first", "5 steps"], [1, 5, 10]), (["4 steps", "1 epoch"], [4, 8, 12]),
        ([2, 3], [2, 3, 4, 6, 8, 9, 10, 12]), (None, []),
    ],
)  # fmt: skip
def test_due_points(value: Any, expected: list[int]) -> None:
    assert due_steps(value) == expected


def test_due_points_in_steps_do_not_move_with_the_accumulation() -> None:
    assert due_steps("5 steps", batches=3) == due_steps("5 steps") == [5, 10]


def test_a_point_inside_a_step_is_due_at_its_end_and_once() -> None:
    # Steps end at batches 3, 6, 9, ...; points at 4, 8, 12, 16, ...
    assert due_steps("4 batches", batches=3, steps=6) == [2, 3, 4, 6]
    assert due_steps("1 batch", batches=3, steps=3) == [1, 2, 3]


@pytest.mark.parametrize("value", [3, "0.5 epoch", "7 samples", "30 tokens", [2, 3], ["first", 4]])
@pytest.mark.parametrize("begin", range(1, 12))
def test_a_schedule_that_begins_later_keeps_the_grid(value: Any, begin: int) -> None:
    assert due_steps(value, begin=begin) == [step for step in due_steps(value) if step > begin]


def test_tenths_have_no_holes() -> None:
    # 0.1 and its multiples are no binary fractions.
    for parts in (3, 7, 10, 30, 100):
        assert due_steps(f"{1 / parts} epoch", per_epoch=parts, steps=5 * parts) == list(range(1, 5 * parts + 1))


def test_time_counts_over_all_legs() -> None:
    state = RunState(seconds_before=59.0)
    schedule = Schedule(interval("1 min"), state)
    assert not schedule.is_due(state)
    state.seconds_before = 61.0
    assert schedule.is_due(state)
    assert not schedule.is_due(state)
    state.seconds_before = 250.0
    assert schedule.is_due(state)
    state.seconds_before = 299.0
    assert not schedule.is_due(state)


def test_steps_that_do_not_move_are_due_once() -> None:
    state = RunState()
    schedule = Schedule(interval(["first", 2]), state)
    found = []
    for step in (0, 0, 1, 1, 2, 2, 2, 3, 4):
        state.step = step
        found.append(schedule.is_due(state))
    assert found == [False, False, True, False, True, False, False, False, True]


def test_the_end() -> None:
    state = RunState()
    assert Schedule(interval(["last", 2]), state).is_due_at_end
    assert not Schedule(interval(2), state).is_due_at_end
