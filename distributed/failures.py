"""What the processes of a run tell each other about exceptions and positions, in a form that a store can hold."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .positions import HERE

# Stores hold small values: the end of a long traceback is what tells.
MOST_CHARACTERS = 20_000
_FOLDER = str(Path(__file__).parent)
_OWN_FILES = tuple(f"{_FOLDER}/{name}.py" for name in ("failures", "watch", "watcher"))


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of one process, as the others get to know it."""

    index: int
    """The process that failed."""
    place: str
    """Where it stood."""
    kind: str
    """The exception's class."""
    text: str
    """Its message."""
    traceback: str
    """Its traceback, with the causes; empty where it adds nothing."""
    seconds: float
    """When, in seconds since the epoch, by that process's clock."""

    @classmethod
    def of(cls, error: BaseException, index: int) -> Failure:
        """What others get to know of an exception of this process, which has the given index. Local."""
        lines = "".join(traceback.format_exception(error))
        return cls(index, str(HERE), type(error).__name__, str(error), lines[-MOST_CHARACTERS:], time.time())

    def as_dict(self) -> dict[str, Any]:
        """What `Failure(**...)` makes it of again."""
        return dataclasses.asdict(self)

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that the process lost others or waited in vain, so that the group is broken."""
        return self.kind in ("PeerFailedError", "CollectiveTimeoutError")

    def headline(self) -> str:
        """One line: who, what, where."""
        said = self.text.strip().partition("\n")[0]
        return f"process {self.index} failed first, at {self.place}: {self.kind}{': ' if said else ''}{said}"

    def __str__(self) -> str:
        details = self.traceback.rstrip() or self.text
        return f"{self.headline()}\n{indent(details)}" if details else self.headline()


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a process stood when another one asked."""

    index: int
    place: str
    operation: str | None
    """The collective that it was inside of, None outside."""
    stack: str
    """The Python stack of its main thread, innermost call last."""
    entries: int = 0
    """How many collectives it had entered, by which two answers out of one are told from those out of two."""

    @classmethod
    def now(cls, index: int) -> Answer:
        """The answer of this process, which has the given index. Local."""
        return cls(index, str(HERE), HERE.operation, main_stack()[-MOST_CHARACTERS:], HERE.entries)

    def to_text(self) -> str:
        """What `of` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Answer:
        """The answer that another process wrote."""
        return cls(**json.loads(text))


def main_stack() -> str:
    """The Python stack of this process's main thread, innermost call last, without the calls that ask for it. Local."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    while frames and frames[-1].filename in _OWN_FILES:
        frames.pop()
    return "".join(traceback.format_list(frames[-30:]))


def indent(text: str, by: str = "    ") -> str:
    """The text with each line moved to the right."""
    return "\n".join(f"{by}{line}" if line else line for line in text.rstrip().splitlines())
