"""Running a task's step once more without its values being logged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unlogged(task: Any) -> Iterator[None]:
    """A context in which what the task logs goes nowhere."""
    task.__dict__["log"] = lambda *values, **options: None
    try:
        yield
    finally:
        del task.__dict__["log"]
