"""From the text of a scalar to the type of its field: one rule for the file, the environment and the flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .text import NULLS, Plain

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = {
    f"{sign}{dot}{word}": float(f"{sign}{word}")
    for sign in ("", "-", "+")
    for dot in ("", ".")
    for word in ("inf", "nan")
}


class UnreadableError(ValueError):
    """A text that none of its field's types can take; the message says what is accepted."""


class Verbatim:
    """Text in a field without a type, wrapped so that jsonargparse doesn't guess at it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return repr(self.text)


def read_scalar(text: str, kinds: Sequence[Any]) -> object:
    """The value that `text` is for a field whose type is any of `kinds`.

    Text in quotes stays text where the field takes text. Otherwise numbers come before booleans, booleans before
    text; what nothing here reads is returned as it is, for jsonargparse to judge.

    Raises:
        UnreadableError: the field takes a boolean and nothing else, and the text is none.
    """
    is_quoted = not isinstance(text, Plain)
    if str in kinds and (is_quoted or set(kinds) <= {str, type(None)}):
        return str(text)
    for kind, reader in ((int, _read_integer), (float, _read_float), (bool, _read_boolean)):
        if kind in kinds:
            value = reader(str(text))
            if value is not None:
                return value
    if str in kinds:
        return str(text)
    if Any in kinds:
        return Verbatim(str(text)) if is_quoted else read_untyped(text)
    if set(kinds) <= {bool, type(None)}:
        words = ", ".join([*sorted(TRUE_WORDS), *sorted(FALSE_WORDS)])
        raise UnreadableError(f"{str(text)!r} is not a boolean. Expected true or false (or one of: {words}).")
    return str(text)


def read_untyped(text: str) -> object:
    """A scalar without a known type: null, true, false, a number, or else text."""
    if text in NULLS:
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    integer = _read_integer(text)
    if integer is not None:
        return integer
    if _NUMBER.fullmatch(text) or text.lower() in (".inf", "-.inf", "+.inf", ".nan"):
        return _read_float(text)
    return Verbatim(str(text))


def _read_integer(text: str) -> int | None:
    return int(text.replace("_", "")) if _INTEGER.fullmatch(text) else None


def _read_float(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(text.lower())


def _read_boolean(text: str) -> bool | None:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    return False if word in FALSE_WORDS else None
