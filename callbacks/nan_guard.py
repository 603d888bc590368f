"""`NaNGuard`: what happens when a loss or a gradient is NaN or infinite."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import torch

from ..checkpoint.finite import all_finite
from ..distributed.errors import ConfigError, NonFiniteError, check_boolean, check_integer, suggest
from ..strategies.optimizer import parameters_of
from .callback import Callback, NonFiniteSkip, NonFiniteStop
from .intervals import Interval, IntervalLike, Schedule
from .nan_report import Buffers, Occurrence, describe

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..strategies.outcome import StepOutcome
    from .view import TaskView, TrainerView

Policy: TypeAlias = Literal["raise", "skip", "stop"]

_NEVER = 2**62


class NaNGuard(Callback):
    """Acts on a loss or a gradient that is NaN or infinite, before it reaches the weights.

    Every report names the step, the batch, the samples, which of them were not finite already, and the first module
    whose output is not finite. To find that module, `training_step` runs once more on the batch, without gradients and
    logging and with random states and buffers put back; under `"skip"` only at the first time, since what a step counts
    itself is counted twice by that. Where each loss is watched (see `every`) the weights are still finite then,
    whatever the policy, so that what is saved at the end is good; `ModelCheckpoint` also checks for itself. fp16's
    overflows, which its loss scaling expects and drops, are none.

    `nonfinite_steps` counts the optimizer steps that this happened in, and is put into the next record.

    Args:
        policy: `"raise"`: end the run with `NonFiniteError`. `"stop"`: end it in order. `"skip"`: drop the whole
            accumulation window, put buffers (batch norm's means) back from a copy of all, and go on.
        every: how often losses are looked at. By default on each micro-batch, gradients on each step, where this costs
            little: on the CPU, and under `"skip"`, which can't do with less and reads the device once per step for it.
            Elsewhere every 50 steps: losses are then watched on the device without waiting for it, so that the report
            still names the first bad step, but comes later, when the weights may have become bad as well.
        max_skips: steps that may be skipped in a run; one more raises.
        locate: whether to look for the first bad module.
    Raises:
        ConfigError: an argument can't be used.
    """

    provides = ("nonfinite_steps",)

    def __init__(
        self,
        policy: Policy = "raise",
        *,
        every: IntervalLike | None = None,
        max_skips: int = 100,
        locate: bool = True,
    ) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"NaNGuard(policy={policy!r}). {suggest(policy, get_args(Policy))}")
        check_integer("NaNGuard(max_skips)", max_skips, 1, "It counts optimizer steps.")
        check_boolean("NaNGuard(locate)", locate)
        self.policy = policy
        self.steers = policy != "raise"
        self.interval = None if every is None else Interval.parse(every, unit="steps", option="NaNGuard(every)")
        if policy == "skip" and self.interval is not None and not _is_each_step(self.interval):
            raise ConfigError(
                f"NaNGuard(policy='skip', every={every!r}) would miss what it has to skip. Leave out every=."
            )
        self.max_skips = max_skips
        self.locate = locate
        self.nonfinite_steps = 0
        """Optimizer steps in which a loss or a gradient was not finite."""
        self._restored: dict[str, Any] | None = None
        self._watches_each = True
        self._schedule: Schedule | None = None
        self._first_bad: Tensor | None = None
        self._buffers = Buffers()
        self._bad_window = -1
        self._batch: Any = None
        self._batch_idx = 0
        self._recorded: int | None = None

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        restored, self._restored = self._restored, None
        self._bad_window, self._recorded, self._first_bad, self.nonfinite_steps = -1, None, None, 0
        if restored is not None:
            self.nonfinite_steps, self._recorded = restored["nonfinite_steps"], restored["recorded"]
            first_bad = restored["first_bad"]
            self._first_bad = None if first_bad is None else first_bad.to(trainer.device)
        is_cheap = trainer.device.type == "cpu" or self.policy == "skip"
        self._watches_each = is_cheap if self.interval is None else _is_each_step(self.interval)
        self._schedule = Schedule(
            self.interval or Interval.parse("50 steps", unit="steps", option="every"), trainer.state
        )
        self._buffers = Buffers(task if self.policy == "skip" else None)

    def on_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        self._batch, self._batch_idx = batch, batch_idx
        self._buffers.keep(trainer.window_start)

    def on_before_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        if not self._watches_each:
            self._watch_on_device(trainer, loss)
        elif not math.isfinite(value := loss.item()):
            self._act(trainer, task, f"the loss is {value:g}")

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        if self._bad_window == trainer.window_start:
            raise NonFiniteSkip
        if not self._watches_each:
            return
        if not all_finite(p.grad for p in parameters_of(optimizer) if p.grad is not None):
            self._act(trainer, task, "gradients are not finite")

    def on_step(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        if not self._watches_each and self._schedule is not None and self._schedule.is_due(trainer.state):
            self._look_back(trainer, task)

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        self._batch = None
        if trainer.nonfinite_elsewhere:
            self.nonfinite_steps += 1  # another process found it, and all of them dropped the step
        if trainer.nonfinite_elsewhere or self._buffers.window == self._bad_window:
            self._buffers.put_back()  # also what micro-batches behind the bad one did in the window that is dropped

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        if trainer.window_start == trainer.state.micro_step:  # no window is carried on: one that was cut is dropped
            self._bad_window = -1
            self._buffers.forget()
        if trainer.error is None:
            self._look_back(trainer, task)

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        if self.nonfinite_steps != self._recorded:
            metrics["nonfinite_steps"] = self._recorded = self.nonfinite_steps

    def _watch_on_device(self, trainer: TrainerView, loss: Tensor) -> None:
        if self._first_bad is None:
            self._first_bad = torch.full((), _NEVER, dtype=torch.int64, device=loss.device)
        bad_step = torch.where(loss.detach().isfinite().all(), _NEVER, trainer.state.step + 1)
        self._first_bad = torch.minimum(self._first_bad, bad_step)

    def _look_back(self, trainer: TrainerView, task: TaskView) -> None:
        if self._first_bad is None or (step := int(self._first_bad)) == _NEVER:
            return
        self._first_bad = None
        self._act(trainer, task, "the loss was not finite", late_step=step)

    def _act(self, trainer: TrainerView, task: TaskView, what: str, late_step: int | None = None) -> NoReturn:
        is_known = self._bad_window == trainer.window_start
        self._bad_window = trainer.window_start
        if is_known:  # another micro-batch of a window that is dropped already
            raise NonFiniteSkip
        self.nonfinite_steps += 1
        occurrence = Occurrence(what, self._batch, self._batch_idx, late_step)
        self._buffers.put_back()
        locate = self.locate and (self.policy != "skip" or self.nonfinite_steps == 1)
        report = describe(trainer, task, occurrence, locate=locate)
        if self.policy == "stop":
            raise NonFiniteStop(f"NaNGuard: {report}")
        if self.policy == "raise":
            raise NonFiniteError(
                f"{report} Lower the learning rate, clip gradients (clip_norm=1.0), repair the data, or use "
                "NaNGuard(policy='skip')."
            )
        if self.nonfinite_steps > self.max_skips:
            raise NonFiniteError(f"{report} {self.max_skips} steps were skipped before; max_skips={self.max_skips}.")
        warnings.warn(f"NaNGuard skips a step: {report}", stacklevel=2)
        raise NonFiniteSkip

    def state_dict(self) -> dict[str, Any]:
        # What is watched on the device and was not read yet is for the leg that goes on.
        return {
            "nonfinite_steps": self.nonfinite_steps,
            "recorded": self._recorded,
            "first_bad": self._first_bad,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved until the run begins, which knows the device."""
        self.nonfinite_steps = state["nonfinite_steps"]
        self._restored = state


def _is_each_step(interval: Interval) -> bool:
    return any(duration.unit in ("steps", "batches") and duration.amount == 1 for duration in interval.every)
