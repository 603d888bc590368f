"""What error messages are made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loopwright.distributed.errors import ConfigError, check_boolean, check_integer, check_number, suggest


@pytest.mark.parametrize(
    ("name", "known", "options", "text"),
    [
        ("singel", ["ddp", "single"], {}, "Did you mean 'single'? Accepted: ddp, single."),
        ("zzz", ["b", "a"], {}, "Accepted: a, b."),
        (None, ["b", "a"], {}, "Accepted: a, b."),
        ("a", [], {}, "Nothing is accepted here."),
        ("sede", ["seed"], {"places": {"seed": "trainer.seed"}}, "Did you mean trainer.seed? Accepted: seed."),
        ("sede", ["task"], {"places": {"seed": "trainer.seed"}}, "Did you mean trainer.seed? Accepted: task."),
        ("singel", ["ddp", "single"], {"is_listed": False}, "Did you mean 'single'?"),
        ("zzz", ["a"], {"is_listed": False}, ""),
    ],
)
def test_suggest(name: object, known: list[str], options: dict[str, object], text: str) -> None:
    assert suggest(name, known, **options) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2, 3, 10**30])
def test_integers_from_the_least_on_are_accepted(value: int) -> None:
    check_integer("accumulate", value, 2)


@pytest.mark.parametrize("value", [1, -1, True, 2.0, "2", None])
def test_everything_else_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_integer("accumulate", value, 2)
    assert str(caught.value) == f"accumulate={value!r}. Expected an integer >= 2."


def test_the_owner_and_what_it_counts_may_be_named() -> None:
    with pytest.raises(ConfigError, match=r"^Early\(patience=0\)\. Expected an integer >= 1\. It counts checks\.$"):
        check_integer("Early(patience)", 0, 1, "It counts checks.")


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (-5, {}),
        (math.inf, {}),
        (0, {"least": 0}),
        (np.float32(0.5), {"above": 0}),
        (np.int64(1), {"above": 0, "allows_infinity": False}),
    ],
)
def test_numbers_within_the_bounds_are_accepted(value: object, bounds: dict[str, Any]) -> None:
    check_number("clip_norm", value, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        ("1", {}, "a number"),
        (None, {}, "a number"),
        (True, {}, "a number"),
        (math.nan, {}, "a number"),
        (10**400, {}, "a number"),
        (-0.5, {"least": 0}, "a number >= 0"),
        (0, {"above": 0}, "a number above 0"),
        (math.inf, {"above": 0, "allows_infinity": False}, "a finite number above 0"),
    ],
)
def test_every_other_number_is_an_error(value: object, bounds: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_number("Stop(limit)", value, **bounds, hint="In seconds.")
    assert str(caught.value) == f"Stop(limit={value!r}). Expected {expected}. In seconds."


@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_what_only_looks_like_a_boolean_is_an_error(value: object) -> None:
    check_boolean("progress", True)
    check_boolean("progress", False)
    with pytest.raises(ConfigError) as caught:
        check_boolean("progress", value, "It shows a bar.")
    assert str(caught.value) == f"progress={value!r}. Expected True or False. It shows a bar."
