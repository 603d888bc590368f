"""`SWA`: the mean of the weights over the last part of a run."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributed.errors import ConfigError, check_boolean, check_number
from .averaging import WeightAveraging
from .intervals import Duration, IntervalLike
from .statistics import recompute_statistics, trained_norms

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.optim import Optimizer

    from .state import RunState
    from .view import TaskView, TrainerView


class SWA(WeightAveraging):
    """Averages the weights over the last part of a run, and leaves the mean in the task (stochastic weight averaging).

    Behind `start` the weights at each point of `every` count alike. A run that ends in order leaves their mean in the
    task, and computes the statistics of batch norms anew for it by one pass over the training data: their plain means
    over its batches. No optimizer, scaler or schedule steps there, and no event fires. After an exception or a signal
    the training weights stay.

    Before that, the run's validations and what `save_model` writes see the mean as it is so far, with averaged
    statistics.

    Args:
        start: when averaging begins: a fraction of the run below 1, epochs, or another unit: `"500 steps"`.
        every: how often weights are added to the mean, in whole epochs or steps.
        lr: the learning rate from there on, of all parameter groups; the task's schedules go on behind it and have no
            effect. None: leave it to them.
        anneal: how long the rate takes from what it was to `lr`, along a cosine; None: none.
        recompute_statistics: compute the statistics of batch norms anew. False: leave their averages.
        evaluates: whether validations and `save_model` see the mean.
    Raises:
        ConfigError: an argument can't be used; or at `fit`: two callbacks evaluate their averages, or the statistics
            can't be computed, as the task steps its optimizers itself.
    """

    def __init__(
        self,
        start: float | str = 0.75,
        *,
        every: IntervalLike = "1 epoch",
        lr: float | None = None,
        anneal: int | str | None = None,
        recompute_statistics: bool = True,
        evaluates: bool = True,
    ) -> None:
        check_boolean("SWA(recompute_statistics)", recompute_statistics)
        super().__init__(every, _read_start(start), use_buffers=True, evaluates=evaluates, stays=True)
        if lr is not None:
            check_number("SWA(lr)", lr, least=0, allows_infinity=False)
        if anneal is not None and lr is None:
            raise ConfigError(f"SWA(anneal={anneal!r}) has no rate to lead to. Give it by lr=.")
        self.lr = lr
        self._anneal = None if anneal is None else Duration.parse(anneal, unit="epochs", option="SWA(anneal)")
        self._recomputes = recompute_statistics

    def _forget(self) -> None:
        super()._forget()
        self._began_at = 0.0  # in the unit of `anneal`
        self._first_rates: list[list[float]] = []
        self._norms: list[_BatchNorm] = []
        self._modes: dict[nn.Module, bool] = {}

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        super().on_fit_start(trainer, task)
        if self._recomputes and not task.automatic_optimization and trained_norms(task):
            raise ConfigError(
                "SWA computes the statistics of batch norms by training_step, which in manual optimization would step "
                "the optimizers. Give it recompute_statistics=False, which leaves the averages of the statistics."
            )

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        super().on_before_step(trainer, task, optimizer)
        self._set_rates(trainer)

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        super().on_batch_end(trainer, task, outputs)
        self._set_rates(trainer)  # so that records show what the next step will use

    def _begin(self, trainer: TrainerView) -> None:
        if self._anneal is not None and self.lr is not None:
            self._began_at = self._anneal.count(trainer.state)
            groups = [optimizer.param_groups for optimizer in trainer.optimizers]
            self._first_rates = [[float(group.get("lr", self.lr)) for group in each] for each in groups]

    def _share(self) -> float:
        return 1 / (self.num_averaged + 1)

    def _average(self, trainer: TrainerView) -> None:
        if self._averages is None:
            self._make_averages(trainer)
        else:
            super()._average(trainer)

    def _set_rates(self, trainer: TrainerView) -> None:
        if self.lr is None or self._newest_step is None:
            return
        left = self._annealing_left(trainer.state)
        for index, optimizer in enumerate(trainer.optimizers):
            first = self._first_rates[index] if index < len(self._first_rates) else []
            for number, group in enumerate(optimizer.param_groups):
                before = first[number] if number < len(first) else self.lr  # a group that was added later
                rate = self.lr + (before - self.lr) * left
                if isinstance(group.get("lr"), Tensor):  # as compiled optimizers want it
                    group["lr"].fill_(rate)
                elif "lr" in group:
                    group["lr"] = rate

    def _annealing_left(self, state: RunState) -> float:
        """The share of the way to `lr` that is left, from 1 to 0."""
        if self._anneal is None:
            return 0.0
        done = (self._anneal.count(state) - self._began_at) / self._anneal.amount
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2

    def _prepare_end(self, task: Any) -> None:
        self._norms = trained_norms(task) if self._recomputes else []
        self._modes = {module: module.training for module in task.modules()}

    def _finish(self, trainer: TrainerView, task: TaskView) -> None:
        if not self.num_averaged and not trainer.is_fast_dev_run:
            warnings.warn(
                f"SWA averaged nothing in {trainer.state.step} steps: the task keeps its training weights. No point of "
                f"every='{self._every}' lies behind start={self._start}. Begin earlier, or count in steps.",
                stacklevel=2,
            )
        super()._finish(trainer, task)

    def _complete(self, trainer: TrainerView, task: TaskView) -> None:
        if not self._norms:
            return
        try:
            recompute_statistics(trainer, task, self._norms, self._modes)
        except Exception as error:
            error.add_note(
                "raised while SWA computed the statistics of batch norms anew, after training; the task keeps its "
                "training weights. SWA(recompute_statistics=False) leaves this out."
            )
            raise

    def state_dict(self) -> dict[str, Any]:
        own = {"began_at": self._began_at, "first_rates": self._first_rates}
        return own | super().state_dict()

    def _take_back(self, trainer: TrainerView, state: dict[str, Any]) -> None:
        super()._take_back(trainer, state)
        self._began_at, self._first_rates = state["began_at"], state["first_rates"]


def _read_start(start: object) -> Duration | float:
    """A fraction of the run, or a duration; whole numbers count epochs.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(start, float) and 0 <= start < 1:
        return start
    if start == 0 and not isinstance(start, bool):
        return 0.0
    if isinstance(start, float) and not start.is_integer():
        raise ConfigError(
            f"SWA(start={start!r}). Expected a fraction of the run below 1, epochs, or a text as '500 steps'."
        )
    return Duration.parse(start, unit="epochs", option="SWA(start)")  # type: ignore[arg-type]
