"""Questions on the terminal, one line each; Enter takes what is offered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributed.errors import ConfigError, suggest
from .launch_options import convert
from .launch_tables import OPTIONS


def ask(question: str, name: str, default: Any, *, least: int | None = None, may_be_empty: bool = False) -> Any:
    """One answer, as the option takes it; asked again until it can be used.

    Args:
        question: what is asked.
        name: the option that the answer is for.
        default: what Enter takes; None: nothing is offered.
        least: the smallest number that is accepted.
        may_be_empty: whether Enter without an offer is an answer, which is None then.
    Raises:
        ConfigError: the input has ended.
    """
    shown = {True: "yes", False: "no", None: ""}.get(default, default) if OPTIONS[name].kind is bool else default
    while True:
        text = _input(f"{question} [{'' if shown is None else shown}] ").strip()
        if not text and (default is not None or may_be_empty):
            return default
        problem = _problem(text, name, least)
        if problem is None:
            return convert(name, text, question)
        print(problem)


def fill(
    keys: dict[str, Any],
    name: str,
    question: str,
    default: Any,
    *,
    least: int | None = None,
    may_be_empty: bool = False,
) -> Any:
    """Ask, and put the answer among the keys by its option's name; nothing where it is None. The answer, as `ask`."""
    answer = ask(question, name, default, least=least, may_be_empty=may_be_empty)
    if answer is not None:
        keys[name] = answer
    return answer


def ask_word(question: str, words: Sequence[str], default: str) -> str:
    """One of some words, in any case.

    Raises:
        ConfigError: the input has ended.
    """
    while True:
        text = _input(f"{question} ({', '.join(words)})? [{default}] ").strip().lower() or default
        if text in words:
            return text
        print(f"Answer: got {text!r}. {suggest(text, words)}")


def _problem(text: str, name: str, least: int | None) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if not text:
        return "An answer is needed."
    try:
        value = convert(name, text, "Answer")
    except ConfigError as error:
        return str(error)
    if least is not None and value < least:
        return f"Answer: got {text!r}. Expected an integer >= {least}."
    return None


def _input(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError as error:
        raise ConfigError(
            "the input ended before all questions were answered. `loopwright config --default` asks nothing."
        ) from error
