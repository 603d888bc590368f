"""`RollBack`: back to the last good state in memory after a loss spike, and past the data that led there."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.errors import ConfigError, NonFiniteError, check_integer, check_number
from ..distributed.exchange import exchange
from .callback import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from .view import TaskView, TrainerView

_LEAST_LOSSES = 10
"""Fewer say nothing about a spread."""


class RollBack(Callback):
    """Goes back to a snapshot in memory when the loss spikes or is not finite, and leaves out the data since then.

    A snapshot holds the weights, the optimizers, the schedules, the scaler, the random states, what was logged in the
    epoch, and the averages of `EMA` and `SWA`; it is taken at a step boundary once all losses until there were good and
    all weights are finite. After going back the run is bit for bit the one that has never seen the samples since the
    snapshot: the steps count from there again, the data goes on behind. Trackers get what is recorded until the newest
    step is passed again at that step. The samples that were left out are in `skipped`, and in each checkpoint.

    With several processes each watches its own losses, and all go back where one of them has to. Collective: one small
    message at each look.

    Args:
        every: a look at the losses of all steps since the last one, in optimizer steps. It reads the device once.
        snapshot_every: a snapshot, in optimizer steps, a multiple of `every`; also one at the start of each epoch. What
            is left out at most.
        sigmas: a step's loss is a spike where it is so many standard deviations above the mean of the last ones. None:
            only what is not finite is one.
        history: over how many losses mean and deviation are taken; below 10 nothing is a spike.
        least_rise: no loss is a spike that is above the mean by less than this, in units of the loss.
        max_times: how often a run may go back; the next time it ends with an error.
    Raises:
        ConfigError: an argument is no number of its range; at the start of the training: the task steps its optimizers
            itself.
    """

    steers = False
    before = ("ModelCheckpoint", "WeightAveraging")  # what they do at a boundary is done with the weights that stay

    def __init__(
        self,
        *,
        every: int = 10,
        snapshot_every: int = 100,
        sigmas: float | None = 6.0,
        history: int = 100,
        least_rise: float = 0.0,
        max_times: int = 10,
    ) -> None:
        check_integer("RollBack(every)", every, 1, "It counts optimizer steps.")
        check_integer("RollBack(snapshot_every)", snapshot_every, 1, "It counts optimizer steps.")
        if snapshot_every % every:
            raise ConfigError(
                f"RollBack(snapshot_every={snapshot_every}, every={every}): a snapshot is taken at a look. Expected a "
                f"multiple, such as snapshot_every={every * max(1, snapshot_every // every)}."
            )
        if sigmas is not None:
            hint = "None looks for losses alone that are not finite."
            check_number("RollBack(sigmas)", sigmas, above=0, allows_infinity=False, hint=hint)
        check_integer("RollBack(history)", history, _LEAST_LOSSES, "It counts optimizer steps.")
        check_number("RollBack(least_rise)", least_rise, least=0, allows_infinity=False, hint="In units of the loss.")
        check_integer("RollBack(max_times)", max_times, 1, "It counts the times that a run goes back.")
        self._every, self._snapshot_every = every, snapshot_every
        self._sigmas, self._least_rise = sigmas, least_rise
        self._max_times = max_times
        self.skipped: list[dict[str, Any]] = []
        """What was left out, in order: `epoch`, `batches` and `samples` (first and last, counted from 0 in the order of
        this process's, and of all processes', epoch), and the `reason`."""
        self._losses: deque[float] = deque(maxlen=history)
        self._window: list[Tensor] = []
        self._unread: list[Tensor] = []
        self._snapshot: Any = None
        self._place: dict[str, int] = {}
        self._wants_snapshot = True
        self._seen = 0
        self._counted = 0

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Begin to watch; a run that goes on has its losses."""
        if not task.automatic_optimization:
            raise ConfigError(
                "RollBack goes back at step boundaries, and a task with automatic_optimization = False steps its "
                "optimizers itself, where nobody sees its losses. Leave RollBack out."
            )
        if trainer.state.step == 0:
            self._losses.clear()
            self.skipped.clear()
        self._window, self._unread, self._snapshot, self._wants_snapshot = [], [], None, True

    def on_epoch_start(self, trainer: TrainerView, task: TaskView) -> None:
        """No way back leads into an earlier epoch."""
        self._snapshot, self._wants_snapshot = None, True
        if trainer.state.batch == 0:
            self._seen = 0
        self._counted = trainer.state.samples

    def on_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Take a snapshot, where one is due: all that was due at the boundary is done now."""
        if trainer.window_start != trainer.state.micro_step:
            return
        self._window = []
        if self._wants_snapshot and trainer.nonfinite_weight() is None:
            self._wants_snapshot = False
            self._snapshot = trainer.take_snapshot()
            self._place = {"batch": trainer.state.batch, "sample": self._seen}

    def on_before_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """Keep the loss, on its device."""
        self._window.append(loss.detach())

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Look at the losses, where that is due, and go back where one is bad. Collective then."""
        state = trainer.state
        self._count(trainer)
        if trainer.error is not None or trainer.window_start != state.micro_step:
            return
        if self._window:
            self._unread.append(torch.stack([loss.float() for loss in self._window]).mean())
            self._window = []
        # Processes may have epochs of different lengths, of which none knows the others'.
        is_alone = trainer.process.num_processes == 1
        is_last = is_alone and state.batches_per_epoch is not None and state.batch >= state.batches_per_epoch
        if (state.step + state.skipped_steps) % self._every == 0 or is_last:
            self._look(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The losses that spikes are measured by, and what was left out."""
        return {"losses": list(self._losses), "skipped": list(self.skipped), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        self._losses.extend(state["losses"])
        self.skipped, self._seen = list(state["skipped"]), state["seen"]

    def _look(self, trainer: TrainerView) -> None:
        values = torch.stack(self._unread).tolist() if self._unread else []
        self._unread = []
        found = self._find_bad(values)
        told = [found] if trainer.process.num_processes == 1 else exchange(found, "RollBack")
        bad = [(*each, index) for index, each in enumerate(told) if each is not None]
        if bad:
            _, reason, index = min(bad, key=lambda each: each[0])  # a step later it may be bad on all of them
            self._go_back(trainer, reason if len(told) == 1 else f"process {index}: {reason}")
            return
        self._losses.extend(values)
        if (trainer.state.step + trainer.state.skipped_steps) % self._snapshot_every == 0:
            self._wants_snapshot = True

    def _find_bad(self, values: list[float]) -> tuple[int, str] | None:
        """Which of these losses is bad, judged by those before it, and what is wrong with it."""
        known = list(self._losses)
        for number, value in enumerate(values):
            if not math.isfinite(value):
                return number, f"the loss is {value:g}"
            if self._sigmas is not None and len(known) >= _LEAST_LOSSES:
                mean, deviation = statistics.fmean(known), statistics.pstdev(known)
                if value > mean + max(self._sigmas * deviation, self._least_rise):
                    was = f"{mean:.4g} with a standard deviation of {deviation:.2g}"
                    return number, f"the loss is {value:.4g}, and was {was}"
            known = [*known, value][-(self._losses.maxlen or 0) :]
        return None

    def _go_back(self, trainer: TrainerView, reason: str) -> None:
        state = trainer.state
        if self._snapshot is None:
            raise NonFiniteError(
                f"RollBack: at step {state.step} {reason}, and there is no state to go back to: the weights were not "
                "finite at the start of this epoch. Lower the learning rate, or clip gradients (clip_norm=1.0)."
            )
        if len(self.skipped) >= self._max_times:
            raise NonFiniteError(
                f"RollBack: at step {state.step} {reason}. The run has gone back {len(self.skipped)} times before; "
                f"max_times={self._max_times}. Lower the learning rate, clip gradients (clip_norm=1.0), or look at the "
                "data that was left out (RollBack.skipped)."
            )
        entry: dict[str, Any] = {
            "epoch": state.epoch, "batches": [self._place["batch"], state.batch - 1],
            "samples": [self._place["sample"], self._seen - 1], "step": state.step, "reason": reason,
        }  # fmt: skip
        self.skipped.append(entry)
        trainer.go_back_to(self._snapshot)
        self._counted = trainer.state.samples
        self._place = {"batch": state.batch, "sample": self._seen}
        if trainer.process.is_main_process:
            warnings.warn(
                f"RollBack: at step {entry['step']} {reason}. Back to step {trainer.state.step}; batches "
                f"{entry['batches'][0]} to {entry['batches'][1]} of epoch {entry['epoch']} are left out.",
                stacklevel=2,
            )

    def _count(self, trainer: TrainerView) -> None:
        """Count the samples of the epoch that were read, also those that were left out."""
        self._seen += trainer.state.samples - self._counted
        self._counted = trainer.state.samples
