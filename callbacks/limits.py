"""How long a run goes on."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import TypeAlias

from ..distributed.errors import ConfigError
from .intervals import Duration
from .state import RunState

DurationLike: TypeAlias = "int | float | str | datetime.timedelta"


@dataclass(frozen=True, slots=True)
class Limits:
    """The first of these that is reached ends the run."""

    max_epochs: Duration | None = None
    """Epochs; a fraction ends inside an epoch."""
    max_steps: Duration | None = None
    """Applied optimizer steps, or another unit: `"1M tokens"`, `"50000 samples"`, `"300 batches"`."""
    max_time: Duration | None = None
    """Wall-clock training time, over all legs of the run."""

    @classmethod
    def parse(
        cls,
        max_epochs: int | float | str | None = None,
        max_steps: int | str | None = None,
        max_time: float | str | datetime.timedelta | None = None,
    ) -> Limits:
        """Read the three arguments of `Trainer`.

        Raises:
            ConfigError: one can't be read, or has a unit that is not its own.
        """

        def read(option: str, value: DurationLike | None, unit: str, allowed: tuple[str, ...]) -> Duration | None:
            if value is None:
                return None
            duration = Duration.parse(value, unit=unit, option=option)  # type: ignore[arg-type]
            if duration.unit not in allowed:
                raise ConfigError(f"{option}={value!r} counts {duration.unit}. Expected one of: {', '.join(allowed)}.")
            return duration

        return cls(
            read("max_epochs", max_epochs, "epochs", ("epochs",)),
            read("max_steps", max_steps, "steps", ("steps", "batches", "samples", "tokens")),
            read("max_time", max_time, "seconds", ("seconds",)),
        )

    durations: tuple[Duration, ...] = field(init=False, default=())
    """Those that are set."""
    end_inside_epochs: bool = field(init=False, default=False)
    """Whether one of them may be reached inside an epoch."""

    def __post_init__(self) -> None:
        # Asked for at every step, so worked out once.
        found = tuple(d for d in (self.max_epochs, self.max_steps, self.max_time) if d is not None)
        object.__setattr__(self, "durations", found)
        object.__setattr__(self, "end_inside_epochs", any(d.unit != "epochs" or not d.is_whole for d in found))

    def reached(self, state: RunState) -> Duration | None:
        """The limit that the run has reached, None while it may go on. Asked at step boundaries."""
        for duration in self.durations:
            if duration.is_reached(state):
                return duration
        return None
