"""How long a run goes on, and the counters that it is measured in."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

import pytest

from loopwright.callbacks.intervals import Duration
from loopwright.callbacks.limits import Limits
from loopwright.callbacks.state import RunState
from loopwright.distributed.errors import ConfigError


def test_each_argument_has_its_own_unit() -> None:
    limits = Limits.parse(2, 100, 60)
    assert limits.durations == (Duration(2, "epochs"), Duration(100, "steps"), Duration(60, "seconds"))
    assert Limits.parse().durations == ()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epochs": 0.5}, Duration(0.5, "epochs")),
        ({"max_epochs": "3 epochs"}, Duration(3, "epochs")),
        ({"max_steps": "1M tokens"}, Duration(10**6, "tokens")),
        ({"max_steps": "50k samples"}, Duration(50_000, "samples")),
        ({"max_steps": "300 batches"}, Duration(300, "batches")),
        ({"max_time": "30 min"}, Duration(1800, "seconds")),
        ({"max_time": datetime.timedelta(hours=1)}, Duration(3600, "seconds")),
        ({"max_time": 1.5}, Duration(1.5, "seconds")),
    ],
)
def test_what_is_read(arguments: Any, expected: Duration) -> None:
    assert Limits.parse(**arguments).durations == (expected,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epochs": "10 steps"}, r"max_epochs='10 steps' counts steps. Expected one of: epochs"),
        (
            {"max_steps": "1 epoch"},
            r"max_steps='1 epoch' counts epochs. Expected one of: steps, batches, samples, tokens",
        ),
        ({"max_steps": "1 h"}, r"max_steps='1 h' counts seconds"),
        ({"max_time": "1 epoch"}, r"max_time='1 epoch' counts epochs. Expected one of: seconds"),
        ({"max_epochs": 0}, r"max_epochs=0: a duration of 0 epochs is empty"),
        ({"max_steps": 1.5}, r"max_steps=1.5: 1.5 steps is not a whole number"),
    ],
)
def test_what_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits.parse(**arguments)


def test_the_first_that_is_reached() -> None:
    limits = Limits.parse(max_epochs=2, max_steps="10 samples")
    state = RunState(batches_per_epoch=4)
    assert limits.reached(state) is None
    state.samples = 9
    assert limits.reached(state) is None
    state.samples = 12
    assert limits.reached(state) == Duration(10, "samples")
    state.epoch = 2
    assert limits.reached(state) == Duration(2, "epochs")


def test_fractions_of_epochs_are_met_although_they_are_no_binary_ones() -> None:
    limits, state = Limits.parse(max_epochs=0.3), RunState(batches_per_epoch=10)
    state.batch = 2
    assert limits.reached(state) is None
    state.batch = 3
    assert limits.reached(state) is not None


class TestRunState:
    def test_epochs_done(self) -> None:
        state = RunState(epoch=2, batch=1, batches_per_epoch=4)
        assert state.epochs_done == 2.25
        state.epoch_ended = True
        assert state.epochs_done == 3
        assert RunState(epoch=2, batch=1).epochs_done == 2  # the length is unknown

    def test_time_over_legs(self) -> None:
        state = RunState(seconds_before=10.0)
        assert state.seconds == 10
        state.start()
        time.sleep(0.01)
        state.pause()
        assert 10.01 <= state.seconds == state.seconds_before < 15
        state.pause()
        assert state.started_at is None

    def test_counters(self) -> None:
        state = RunState(epoch=1, batch=2, micro_step=3, step=4, skipped_steps=5, samples=6, tokens=7, stage="train")
        assert list(state.counters().values()) == [1, 2, 3, 4, 5, 6, 7]
        other = RunState()
        other.adopt(state)
        assert other.counters() == state.counters()
        assert other.stage == "idle"
        copy = dataclasses.replace(state)
        copy.step += 1
        assert state.step == 4
