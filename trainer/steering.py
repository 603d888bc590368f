"""`Steering`: where callbacks may steer a run after a window's vector was sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..callbacks.bus import overridden

if TYPE_CHECKING:
    from .run import Run

BEFORE_STEP = ("on_backward", "on_before_step")
AFTER_STEP = ("on_step", "on_batch_end")
WHEN_DUE = (
    "on_log", "on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end",
)  # fmt: skip
"""Events after a window's vector was sent, by who sends one more for them: `vote`, `close_window`, `following`."""


class Steering(NamedTuple):
    """Whether a callback may steer out of the events of each of these; as long as nobody knows, it may."""

    before_step: bool = True
    after_step: bool = True
    when_due: bool = True

    @classmethod
    def of(cls, run: Run, *, is_manual: bool) -> Steering:
        """That of this process's callbacks and functions. Local.

        Args:
            run: of this process.
            is_manual: the task steps its optimizers itself: `training_step` steps, clips and stops there.
        """
        return cls(
            _steers_from(run, BEFORE_STEP), is_manual or _steers_from(run, AFTER_STEP), _steers_from(run, WHEN_DUE)
        )

    @classmethod
    def any_of(cls, found: Iterable[Sequence[bool]]) -> Steering:
        """That of all processes: where one of them may steer, all have to ask. Local."""
        return cls(*map(any, zip(*found, strict=True)))


def _steers_from(run: Run, events: Sequence[str]) -> bool:
    listens = any(callback.steers and set(overridden(callback)) & set(events) for callback in run.callbacks)
    return listens or any(f.steers and f.event.__name__ in events for f in run.trainer.functions)
