"""One grammar for every "how often" and "how long".

`"100 steps"` (applied optimizer steps), `"50 batches"` (micro-batches), `"2 epochs"`, `"0.25 epoch"`, `"5000 samples"`,
`"1M tokens"`, `"30 min"`, the words `"first"`, `"last"` and `"never"`, or a list of these. A bare number means the unit
that the option's docstring names. Due points lie on a fixed grid of the counters, so that neither the accumulation nor
a resume moves them; what is due inside an accumulation window is done at its end.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..distributed.errors import ConfigError, suggest
from .state import RunState

Unit: TypeAlias = Literal["steps", "batches", "epochs", "samples", "tokens", "seconds"]
IntervalLike: TypeAlias = (
    "int | float | str | datetime.timedelta | Interval | Sequence[int | float | str | datetime.timedelta | Interval]"
)

_UNITS: dict[str, tuple[Unit, float]] = {
    "step": ("steps", 1), "steps": ("steps", 1),
    "batch": ("batches", 1), "batches": ("batches", 1),
    "epoch": ("epochs", 1), "epochs": ("epochs", 1),
    "sample": ("samples", 1), "samples": ("samples", 1),
    "token": ("tokens", 1), "tokens": ("tokens", 1),
    "s": ("seconds", 1), "sec": ("seconds", 1), "second": ("seconds", 1), "seconds": ("seconds", 1),
    "min": ("seconds", 60), "minute": ("seconds", 60), "minutes": ("seconds", 60),
    "h": ("seconds", 3600), "hour": ("seconds", 3600), "hours": ("seconds", 3600),
    "day": ("seconds", 86400), "days": ("seconds", 86400),
}  # fmt: skip
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_PATTERN = re.compile(
    r"^\s*(?P<number>\d[\d_]*(\.\d+)?([eE][+-]?\d+)?|\.\d+)\s*(?P<multiple>[kKMGBT]?)\s*(?P<unit>[a-zA-Z]*)\s*$"
)


@dataclass(frozen=True, slots=True)
class Duration:
    """An amount of one unit: how long, or how far apart.

    Raises:
        ConfigError: when the amount is not positive, or is a fraction of a unit that has none.
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        is_counted = self.unit not in ("epochs", "seconds")
        if not self.amount > 0 or math.isinf(self.amount):
            raise ConfigError(
                f"a duration of {self.amount:g} {self.unit} is empty or endless. Expected a number above 0."
            )
        if is_counted and not self.is_whole:
            raise ConfigError(
                f"{self.amount:g} {self.unit} is not a whole number. Only epochs and times have fractions."
            )

    @classmethod
    def parse(cls, value: int | float | str | datetime.timedelta | Duration, *, unit: Unit, option: str) -> Duration:
        """Read one duration.

        Args:
            value: a number (of `unit`), a text such as `"100 steps"`, or a timedelta.
            unit: what a bare number counts.
            option: the argument's name, for errors.
        Raises:
            ConfigError: the text, the unit or the amount can't be read.
        """
        if isinstance(value, Duration):
            return value
        if isinstance(value, datetime.timedelta):
            return _checked(value.total_seconds(), "seconds", option, value)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ConfigError(
                f"{option}={value!r} is no duration. Expected a number of {unit} or a text such as '100 steps'."
            )
        if not isinstance(value, str):
            return _checked(value, unit, option, value)
        match = _PATTERN.match(value)
        if match is None:
            raise ConfigError(
                f"{option}={value!r} can't be read. Expected a number and a unit: '100 steps', '0.25 epoch', '1M "
                "tokens', '30 min'."
            )
        number = float(match["number"].replace("_", "")) * _MULTIPLES[match["multiple"]]
        name = match["unit"]
        if not name:
            return _checked(number, unit, option, value)
        if name not in _UNITS:
            raise ConfigError(f"{option}={value!r} has an unknown unit {name!r}. {suggest(name, _UNITS)}")
        kind, factor = _UNITS[name]
        return _checked(number * factor, kind, option, value)

    @property
    def is_whole(self) -> bool:
        """Whether the amount has no fraction."""
        return self.amount == int(self.amount)

    def is_reached(self, state: RunState) -> bool:
        """Whether the run has done this much."""
        return self.count(state) + _EPSILON >= self.amount

    def count(self, state: RunState) -> float:
        """How much of the unit the run has done."""
        match self.unit:
            case "steps":
                return state.step
            case "batches":
                return state.micro_step
            case "epochs":
                return state.epochs_done
            case "samples":
                return state.samples
            case "tokens":
                return state.tokens
            case "seconds":
                return state.seconds

    def __str__(self) -> str:
        unit = self.unit if self.amount != 1 else {"batches": "batch"}.get(self.unit, self.unit[:-1])
        return f"{self.amount:.15g} {unit}"


def _checked(amount: float, unit: Unit, option: str, given: object) -> Duration:
    try:
        return Duration(amount, unit)
    except ConfigError as error:
        raise ConfigError(f"{option}={given!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Interval:
    """When something is due: every so often, at the first step, at the last one, or several of these."""

    every: tuple[Duration, ...] = ()
    first: bool = False
    last: bool = False

    @classmethod
    def parse(cls, value: IntervalLike | None, *, unit: Unit, option: str) -> Interval:
        """Read an interval; None is never due.

        Args:
            value: as `Duration.parse` takes it, `"first"`, `"last"`, or a list of these.
            unit: what a bare number counts.
            option: the argument's name, for errors.
        Raises:
            ConfigError: as `Duration.parse`.
        """
        if value is None:
            return cls()
        if isinstance(value, Interval):
            return value
        parts: list[object] = list(value) if isinstance(value, (list, tuple)) else [value]
        every: list[Duration] = []
        first = last = False
        for part in parts:
            if part == "never":
                continue
            if isinstance(part, Interval):
                every.extend(part.every)
                first, last = first or part.first, last or part.last
            elif part == "first":
                first = True
            elif part == "last":
                last = True
            else:
                every.append(Duration.parse(part, unit=unit, option=option))  # type: ignore[arg-type]
        return cls(tuple(every), first, last)

    @property
    def is_never(self) -> bool:
        """Whether nothing is ever due."""
        return not (self.every or self.first or self.last)

    @property
    def needs_epoch_length(self) -> bool:
        """Whether a fraction of an epoch is asked for, which only a loader with a length can tell."""
        return any(d.unit == "epochs" and not d.is_whole for d in self.every)

    def __str__(self) -> str:
        parts = ["first"] * self.first + [str(d) for d in self.every] + ["last"] * self.last
        return ", ".join(parts) or "never"


class Schedule:
    """Tells at step boundaries whether an interval has come due since it was last asked.

    A point of the grid that falls inside an accumulation window is due at the window's end, once, however many points
    the window crossed. Time is measured from the run's start, so that it goes on over a resume.
    """

    __slots__ = ("_every", "_first", "_is_whole", "_next", "interval")

    def __init__(self, interval: Interval, state: RunState) -> None:
        self.interval = interval
        self._every = interval.every
        self._is_whole = [d.is_whole for d in self._every]
        self._first = interval.first and state.step == 0
        self._next = [_next_point(d, state) for d in self._every]

    def is_due(self, state: RunState) -> bool:
        """Whether something has come due; asking moves on to the next point."""
        due = False
        for index, duration in enumerate(self._every):
            if duration.unit == "steps":  # this and the next are the common ones, without a call
                passed = state.step >= self._next[index]
            elif duration.unit == "epochs" and self._is_whole[index]:
                passed = state.epoch + state.epoch_ended >= self._next[index]
            else:
                passed = duration.count(state) + _EPSILON >= self._next[index]
            if passed:
                due = True
                self._next[index] = _next_point(duration, state)
        if self._first and state.step > 0:
            self._first = False
            due = True
        return due

    @property
    def is_ever_due(self) -> bool:
        """Whether the interval names any point."""
        return not self.interval.is_never

    @property
    def is_due_at_end(self) -> bool:
        """Whether the interval names the last step."""
        return self.interval.last


_EPSILON = 1e-9  # a fraction of an epoch is a quotient: 0.3 may be a hair below its grid point


def _next_point(duration: Duration, state: RunState) -> float:
    done = duration.count(state)
    return (math.floor(done / duration.amount + _EPSILON) + 1) * duration.amount
