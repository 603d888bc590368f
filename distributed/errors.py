"""Every exception that Loopwright raises on purpose.

```
LoopwrightError
├── ConfigError (ValueError)          an argument, an option, a key of a file
│   └── CallbackOrderError            callbacks whose declared order can't be met
├── TaskError (TypeError)             a hook of a Task is missing, or returned something else
├── DataError (ValueError)            a loader or a batch
├── MetricError (ValueError)          a logged value, its weight, a monitored name
├── NonFiniteError (ArithmeticError)  a NaN or an infinity where training can't go on
├── CheckpointError (RuntimeError)    something on disk is missing, damaged, or doesn't fit
├── TrackerError (RuntimeError)       an experiment tracker was used in a way it can't serve
├── DistributedError (RuntimeError)   something between the processes of a run
│   ├── ShapeMismatchError            processes bring data of different shapes to one operation
│   ├── PeerFailedError               another process failed first
│   ├── CollectiveTimeoutError (TimeoutError)  another process did not arrive in time
│   └── LaunchError                   processes can't be started, or one that was started failed
└── MissingDependencyError (ImportError)  an optional package that was asked for is not installed
```

Each also derives from the built-in exception in brackets, so that callers who know only Python catch it.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping


class LoopwrightError(Exception):
    """The base of all errors that Loopwright raises on purpose."""


class ConfigError(LoopwrightError, ValueError):
    """An argument, an option or a key of a file can't be used as given."""


class CallbackOrderError(ConfigError):
    """The declared order of the callbacks has a cycle or lacks a provider."""


class TaskError(LoopwrightError, TypeError):
    """A hook of a Task is missing, or returned something that training can't use."""


class DataError(LoopwrightError, ValueError):
    """A loader or a batch can't be used."""


class MetricError(LoopwrightError, ValueError):
    """A logged value can't be used, or a monitored metric was never logged."""


class NonFiniteError(LoopwrightError, ArithmeticError):
    """A NaN or an infinity appeared where training can't go on."""


class CheckpointError(LoopwrightError, RuntimeError):
    """Something on disk is missing, damaged, or doesn't fit the run."""


class TrackerError(LoopwrightError, RuntimeError):
    """An experiment tracker was used in a way that it can't serve."""


class DistributedError(LoopwrightError, RuntimeError):
    """Something between the processes of a run went wrong."""


class ShapeMismatchError(DistributedError):
    """Processes bring data of different structure, shape or type to one operation."""


class PeerFailedError(DistributedError):
    """Another process of the run failed first, so that this one can't go on."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another process did not arrive at a common operation in time."""


class LaunchError(DistributedError):
    """Processes can't be started, or one that was started failed."""


class MissingDependencyError(LoopwrightError, ImportError):
    """An optional package was asked for and is not installed."""


def suggest(
    name: object, known: Iterable[str], *, places: Mapping[str, str] | None = None, is_listed: bool = True
) -> str:
    """A sentence that lists the accepted names and, when one is close to `name`, that one first.

    Used at the end of error messages: ``f"strategy={name!r} is unknown. {suggest(name, names)}"``.

    Args:
        name: what came.
        known: the accepted names.
        places: where names stand that may have been meant, accepted here or not: `{"seed": "trainer.seed"}`.
        is_listed: False leaves the list out, where it would be long; the text is empty then unless a name is close.
    """
    names, places = sorted(known), places or {}
    near = difflib.get_close_matches(str(name), [*names, *places], n=1)
    meant = f"Did you mean {places.get(near[0], repr(near[0]))}?" if near else ""
    accepted = f"Accepted: {', '.join(names)}." if names else "Nothing is accepted here."
    return " ".join(filter(None, (meant, accepted if is_listed else "")))


def check_integer(option: str, value: object, least: int, hint: str = "") -> None:
    """Refuse what is no integer, or a smaller one. A bool is none.

    Args:
        option: its name for the message, `"accumulate"`, or with its owner, `"EarlyStopping(patience)"`.
        value: what came.
        least: the smallest that is accepted.
        hint: a sentence more: what it counts, what else to do.
    Raises:
        ConfigError: says what came and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{_given(option, value)}. Expected an integer >= {least}. {hint}".rstrip())


def check_number(
    option: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    allows_infinity: bool = True,
    hint: str = "",
) -> None:
    """Refuse what is no number, NaN, and what lies outside the bounds. A bool is none; so is an integer beyond floats.

    Args:
        option: its name for the message, as `check_integer` takes it.
        value: what came.
        least: the smallest that is accepted.
        above: what is accepted is larger than this.
        allows_infinity: whether an infinity within the bounds is accepted.
        hint: a sentence more: its unit, what else to do.
    Raises:
        ConfigError: says what came and what is accepted.
    """
    number = _as_float(value)
    is_fitting = (
        not math.isnan(number)
        and (least is None or number >= least)
        and (above is None or number > above)
        and (allows_infinity or math.isfinite(number))
    )
    if not is_fitting:
        kind = "a number" if allows_infinity else "a finite number"
        bounds = (f">= {least:g}" if least is not None else "", f"above {above:g}" if above is not None else "")
        accepted = " ".join(filter(None, (kind, " and ".join(filter(None, bounds)))))
        raise ConfigError(f"{_given(option, value)}. Expected {accepted}. {hint}".rstrip())


def check_boolean(option: str, value: object, hint: str = "") -> None:
    """Refuse what is neither True nor False: a text such as "false" would count as true.

    Args:
        option: its name for the message, as `check_integer` takes it.
        value: what came.
        hint: a sentence more.
    Raises:
        ConfigError: says what came and what is accepted.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{_given(option, value)}. Expected True or False. {hint}".rstrip())


def _given(option: str, value: object) -> str:
    """`name=value`, or `Owner(name=value)`."""
    return f"{option[:-1]}={value!r})" if option.endswith(")") else f"{option}={value!r}"


def _as_float(value: object) -> float:
    """The value as a float; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # NumPy's scalars are real numbers as well
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
