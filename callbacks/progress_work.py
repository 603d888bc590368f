"""What a progress display shows: the running work, its numbers, and how they read."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .intervals import Duration
    from .state import RunState
    from .view import TrainerView


@dataclass(slots=True, eq=False)
class Work:
    """An epoch, or an evaluation: something that goes through batches."""

    title: str
    total: int | None
    """Its batches, None where nobody knows."""
    done: int = 0
    initial: int = 0
    """Batches that were done before this process began: a resume inside an epoch."""
    paused_seconds: float = 0.0
    """How long it stood still for an evaluation; rates leave this out."""
    parent: Work | None = None
    """The epoch that waits for it, None where it stands alone."""
    is_epoch: bool = False
    """Whether this is training."""
    _started: float = field(default_factory=time.monotonic)
    _marked_done: int = 0
    _marked_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._marked_done = self.initial

    @property
    def has_moved(self) -> bool:
        """Whether a batch was done since the last `lap`."""
        return self.done != self._marked_done

    @property
    def seconds(self) -> float:
        """How long it has been running, evaluations left out."""
        return time.monotonic() - self._started - self.paused_seconds

    def lap(self) -> float | None:
        """Batches per second since the last call, evaluations left out; None where nothing was done."""
        seconds = self.seconds
        batches, passed = self.done - self._marked_done, seconds - self._marked_seconds
        self._marked_done, self._marked_seconds = self.done, seconds
        return batches / passed if batches > 0 and passed > 0 else None


class Display(Protocol):
    """Where progress is shown."""

    needs_every_batch: bool
    """Whether `show` is to be asked after each batch, and not only some times a second."""

    def start(self, state: RunState) -> None:
        """Training begins."""
        ...

    def show(self, work: Work, trainer: TrainerView) -> None:
        """Show how far the work is, where that is due."""
        ...

    def finish(self, work: Work, trainer: TrainerView) -> None:
        """An epoch is done, or an evaluation inside of one."""
        ...

    def end(self, work: Work, trainer: TrainerView) -> None:
        """All is done: `work` was the last epoch, or an evaluation that stood alone."""
        ...

    def close(self) -> None:
        """Let go of the terminal, also after an exception."""
        ...


def epoch_work(trainer: TrainerView) -> Work:
    """The epoch that begins, or goes on after a resume. `state` stands at its first batch."""
    state, limit = trainer.state, trainer.limits.max_epochs
    of = "" if limit is None else f"/{math.ceil(limit.amount)}"
    return Work(
        f"epoch {state.epoch + 1}{of}", _last_batch(trainer), done=state.batch, initial=state.batch, is_epoch=True
    )


def _last_batch(trainer: TrainerView) -> int | None:
    """Where the running epoch ends: at its length, or at a limit of the run that comes first."""
    state = trainer.state
    ends = [] if state.batches_per_epoch is None else [state.batches_per_epoch]
    for limit in trainer.limits.durations:
        ahead = _batches_ahead(limit, trainer)
        if ahead is not None:
            ends.append(state.batch + ahead)
    return min(ends, default=None)


def _batches_ahead(limit: Duration, trainer: TrainerView) -> int | None:
    left = limit.amount - limit.count(trainer.state)
    match limit.unit:
        case "batches":
            return math.ceil(left)
        case "steps":
            return math.ceil(left) * trainer.window_size
        case "epochs" if trainer.state.batches_per_epoch:
            return math.ceil(left * trainer.state.batches_per_epoch)
        case _:
            return None


def seconds_left(trainer: TrainerView) -> float | None:
    """The wall-clock time until the run's first limit, at the pace so far; None where no limit tells."""
    state = trainer.state
    share = max((limit.count(state) / limit.amount for limit in trainer.limits.durations), default=0.0)
    return state.seconds * (1 - share) / share if 0 < share <= 1 else None


def format_number(value: float) -> str:
    """Four significant digits; whole numbers below ten million in full."""
    return str(int(value)) if abs(value) < 1e7 and value == int(value) else f"{value:.4g}"


def format_shares(seconds: Mapping[str, float]) -> str:
    """Where the time went: `"data 3 %, forward 41 %, other 2 % of 0:12:31"`. What rounds to nothing is left out."""
    total = sum(seconds.values())
    shares = {name: round(100 * part / total) for name, part in seconds.items()} if total > 0 else {}
    told = ", ".join(f"{name} {share} %" for name, share in shares.items() if share)
    return f"{told} of {format_seconds(total)}" if told else format_seconds(total)


def format_seconds(seconds: float) -> str:
    """`h:mm:ss`."""
    return str(datetime.timedelta(seconds=round(seconds)))
