"""Random streams put aside and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from loopwright.data.streams import put_streams, seed_all, streams_now

from .resumable import noise


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    generator = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(generator)


def normal() -> float:
    """NumPy's older functions draw these in pairs, and keep the second for the next call."""
    return float(numpy.random.randn())


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("inside", [0, 1, 2])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_nothing_inside_changes_what_is_drawn_outside(before: int, inside: int, later: int) -> None:
    def draws(apart: bool) -> list[float]:
        seed_all(4)
        found = [*noise(), *(normal() for _ in range(before))]
        known = None
        for count in (later, 1, 0):
            if apart:
                known = streams_now(known)
                seed_all(9)
                assert inside == 0 or normal() == first
                for _ in range(inside - 1):
                    normal()
                put_streams(known)
            found += [normal() for _ in range(count)]
        return [*found, *noise(), normal(), normal()]

    seed_all(9)
    first = normal()
    assert draws(True) == draws(False)


def test_what_did_not_change_is_not_copied() -> None:
    seed_all(4)
    first = streams_now()
    assert streams_now(first).numpy is first.numpy
    numpy.random.rand()
    assert streams_now(first).numpy is not first.numpy
    put_streams(first)
    assert streams_now(first).numpy is first.numpy
    normal()
    waiting = streams_now(first)
    assert streams_now(waiting).numpy is not waiting.numpy, "a number waits, and taking it leaves no trace"


def test_other_generators_are_put_back_whole() -> None:
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    state = streams_now()
    assert state.numpy is not None
    assert state.numpy.memory is None
    expected = noise()
    put_streams(state)
    assert noise() == expected
