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
└── MissingDependencyError (ImportError)  an optional package that was asked for is not installed
```

Each also derives from the built-in exception in brackets, so that callers who know only Python catch it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


class MissingDependencyError(LoopwrightError, ImportError):
    """An optional package was asked for and is not installed."""


def suggest(name: object, known: Iterable[str]) -> str:
    """A sentence that lists the accepted names and, when one is close to `name`, that one first.

    Used at the end of error messages: ``f"strategy={name!r} is unknown. {suggest(name, names)}"``.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    accepted = f"Accepted: {', '.join(names)}." if names else "Nothing is accepted here."
    return f"Did you mean {near[0]!r}? {accepted}" if near else accepted
