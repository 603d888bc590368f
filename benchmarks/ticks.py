"""What is measured inside a loop: every loop calls `tick()` first thing in the user's step, once per batch."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from time import perf_counter
from types import FrameType
from typing import Any, Protocol

WARM_STEPS = 60
"""Steps before counting begins: no loop still sets anything up then, and the first step record is out."""


class Ticker(Protocol):
    """Something that wants to know when each batch begins."""

    def tick(self) -> None:
        """A batch is about to be computed."""
        ...


class StepTimer:
    """Keeps when each batch began; the time of a step is the distance of two, so it holds all that a loop does."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._moments: list[float] = []

    def tick(self) -> None:
        """Note the time."""
        self._moments.append(perf_counter())

    def undisturbed_seconds(self) -> float:
        """The 5th percentile of the times of an optimizer step: the steps that nothing else on the machine held up."""
        starts = self._moments[:: self._accumulate]
        times = sorted(later - earlier for earlier, later in pairwise(starts))
        return times[len(times) // 20]


class CallCounter:
    """Counts calls from one optimizer step to another through `sys.setprofile`; exact, and no set-up is in it."""

    def __init__(self, accumulate: int, steps: int) -> None:
        self._first = WARM_STEPS * accumulate
        self._last = (WARM_STEPS + steps) * accumulate
        self._steps = steps
        self._batch = 0
        self._python: Counter[tuple[str, str]] = Counter()
        self._builtin = 0

    def tick(self) -> None:
        """Begin or end counting at the batch where it is due."""
        if self._batch == self._first:
            sys.setprofile(self._hook)
        elif self._batch == self._last:
            sys.setprofile(None)
        self._batch += 1

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code is not CallCounter.tick.__code__:
            self._python[code.co_filename, code.co_qualname] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            self._builtin += 1

    def python_calls(self) -> float:
        """Calls of Python functions per optimizer step (a generator's resumption is one, as CPython counts it)."""
        self._check()
        return sum(self._python.values()) / self._steps

    def builtin_calls(self) -> float:
        """Calls of functions written in C per optimizer step."""
        return self._builtin / self._steps

    def all_calls(self) -> float:
        """Python and C together, per optimizer step."""
        return self.python_calls() + self.builtin_calls()

    def by_function(self) -> dict[tuple[str, str], float]:
        """Python calls per optimizer step of each (file, function)."""
        return {where: count / self._steps for where, count in self._python.items()}

    def _check(self) -> None:
        if self._batch <= self._last:
            sys.setprofile(None)
            raise RuntimeError(f"the loop ended after {self._batch} batches; {self._last + 1} are needed to count")
