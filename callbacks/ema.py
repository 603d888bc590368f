"""`EMA`: an exponential moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..distributed.errors import ConfigError, check_boolean
from .averaging import WeightAveraging
from .intervals import Duration, IntervalLike

if TYPE_CHECKING:
    from .view import TrainerView


class EMA(WeightAveraging):
    """Keeps an exponential moving average of the weights, and evaluates and saves it in their place.

    After each optimizer step `average = decay * average + (1 - decay) * weight`, from the weights at `start` on. The
    run's validations see the average, and so does what `save_model` writes. Training does not, and after `fit` the task
    has its training weights: `with ema.applied_to(task): trainer.test(task)` evaluates the average then. `final=True`
    leaves the average in the task.

    Args:
        decay: how much of the average stays at each update, from 0 to below 1.
        every: how often it is updated, in optimizer steps; also `"1 epoch"`.
        start: when averaging begins: optimizer steps, or another unit. By default with the first step.
        use_buffers: also average buffers that hold fractions, such as the statistics of batch norms. False: those of
            the training weights are used.
        evaluates: whether validations and `save_model` see the average.
        final: leave the average in the task when a run ends in order; not after an exception or a signal.
    Raises:
        ConfigError: an argument can't be used; or at `fit`: two callbacks evaluate their averages.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every: IntervalLike = "1 step",
        start: int | str | None = None,
        use_buffers: bool = True,
        evaluates: bool = True,
        final: bool = False,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"EMA(decay={decay!r}). Expected a number from 0 to below 1, such as 0.999.")
        check_boolean("EMA(use_buffers)", use_buffers)
        check_boolean("EMA(final)", final)
        super().__init__(every, _read_start(start), use_buffers=use_buffers, evaluates=evaluates, stays=final)
        self.decay = float(decay)

    def _begin(self, trainer: TrainerView) -> None:
        self._make_averages(trainer)

    def _share(self) -> float:
        return 1 - self.decay


def _read_start(start: int | str | None) -> Duration | float:
    if start is None or (start == 0 and not isinstance(start, bool)):
        return 0.0
    return Duration.parse(start, unit="steps", option="EMA(start)")
