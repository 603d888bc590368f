"""What error messages are made of."""

from __future__ import annotations

import pytest

from loopwright.distributed.errors import ConfigError, check_integer, suggest


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
