"""Who waits for whom in vain, by what two processes say of where they wait."""

from __future__ import annotations

import pytest

from loopwright.distributed.divergence import Waiting, divergence
from loopwright.distributed.positions import AVERAGING, MEETING


def waiting(index: int, kind: str | None, num_averagings: int) -> Waiting:
    return Waiting(index, kind, "agree" if kind == MEETING else "average", num_averagings)


def test_who_met_before_an_averaging_is_named() -> None:
    text = divergence(waiting(1, MEETING, 3), waiting(0, AVERAGING, 4))
    assert text is not None
    assert text.startswith(
        "process 1 left its training_step before a backward pass in which process 0 waits for it: it"
    )
    assert "in 'agree' after 3 backward passes, and process 0 is in its 4. one" in text


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (waiting(1, MEETING, 4), waiting(0, AVERAGING, 4)),  # ahead: that averaging is about to end
        (waiting(0, AVERAGING, 4), waiting(1, MEETING, 3)),  # for the other one to say
        (waiting(0, MEETING, 3), waiting(1, MEETING, 4)),
        (waiting(0, AVERAGING, 3), waiting(1, AVERAGING, 4)),
        (waiting(0, MEETING, 3), waiting(1, None, 4)),
    ],
)
def test_others_may_still_meet(own: Waiting, other: Waiting) -> None:
    assert divergence(own, other) is None


def test_only_what_the_group_has_seen_counts() -> None:
    before = Waiting.now(0, 0).num_averagings
    assert Waiting.now(0, before).num_averagings == 0
    assert Waiting(**Waiting.now(1, 0).as_dict()) == Waiting.now(1, 0)
