from __future__ import annotations

import itertools

import pytest

from loopwright.trackers.names import NameRule, original_name

PATHS = NameRule(accepted=r"[\w/.\- :]", is_path=True, max_length=250)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("train/loss", "train/loss"),
        ("val/a b", "val/a b"),
        ("größe", "größe"),
        ("a:b-c_d.e", "a:b-c_d.e"),
        ("train-xent", "train-xent"),
        ("..a/b", "-x2e-.a/b"),
        ("recall@5", "recall-x40-5"),
        ("cpu(%)", "cpu-x28--x25--x29-"),
        ("acc[top1]", "acc-x5b-top1-x5d-"),
        ("beta=2", "beta-x3d-2"),
        ("a\n", "a-xa-"),
        ("😀", "-x1f600-"),
        ("a//b", "a/-x2f-b"),
        ("/a/", "-x2f-a-x2f-"),
        ("a/../b", "a/-x2e-./b"),
        (".", "-x2e-"),
        ("", "-x-"),
        ("a-x40-b", "a-x2d-x40-b"),
    ],
)
def test_stored_name_and_back(name: str, stored: str) -> None:
    assert PATHS.apply(name) == stored
    assert original_name(stored) == name


def test_no_two_short_names_merge_and_each_is_found_again() -> None:
    """Every name of up to 6 of these signs, which are the ones that escapes are made of."""
    names = ["".join(signs) for length in range(7) for signs in itertools.product("-x4@/", repeat=length)]
    stored = [PATHS.apply(name) for name in names]
    assert len(set(stored)) == len(names)
    assert [original_name(name) for name in stored] == names


def test_reserved_names_give_way() -> None:
    rule = NameRule(reserved=frozenset({"step", ""}))
    assert [rule.apply(name) for name in ("step", "", "steps", "@//\n")] == ["-x73-tep", "-x-", "steps", "@//\n"]
    assert NameRule().apply("") == ""


def test_long_names_keep_their_beginning_and_stay_apart() -> None:
    first, second = PATHS.apply("x" * 251), PATHS.apply("x" * 250 + "y")
    assert first != second
    assert {len(first), len(second)} == {250}
    assert first.startswith("x" * 233 + "-")
    assert PATHS.apply("x" * 250) == "x" * 250
    assert PATHS.apply("x" * 251) == first
    assert len(PATHS.apply("\ud800" * 100)) == 250
