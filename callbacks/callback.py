"""`Callback`: one method per event. This class body is the one declaration of the events and of their order.

In `fit`; `[S]` marks what fires only where gradients synchronise, at the end of an accumulation window:

```
on_setup -> on_fit_start
  per epoch:  on_epoch_start
    per batch: on_batch_start
               training_step
               on_before_backward(loss) -> backward -> on_backward(loss)
          [S]  unscale, clip -> on_before_step(optimizer) -> optimizer.step -> on_step(outcome)
          [S]  scheduler.step, zero_grad
               on_batch_end(outputs)
    validation, when due: on_validation_start -> on_validation_batch_start/_end per batch -> on_validation_end(metrics)
    on_epoch_end(metrics)
on_stop -> on_fit_end -> on_teardown
```

`on_exception(error)` fires wherever one is raised; `on_log(metrics, step)` for each record that goes to the trackers;
`on_save_state(state)`, `on_saved(path)` and `on_load_state(state)` around checkpoints. Test and predict have the events
of validation with their own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..distributed.flow import Flow

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from ..strategies.outcome import StepOutcome
    from .intervals import Interval
    from .view import TaskView, TrainerView


class ControlFlow(Flow):
    """The base of the exceptions by which a callback or a hook of the task steers the loop."""


class SkipBatch(ControlFlow):
    """Raise it before a batch's backward to leave the batch out, or in `on_before_step` to drop the step."""


class NonFiniteSkip(SkipBatch):
    """`SkipBatch` for a value that is not finite, so that the other processes of the run count it as well."""


class EndEpoch(ControlFlow):
    """Raise it to end the running epoch after this batch; gradients of an open window are dropped."""


class StopRun(ControlFlow):
    """Raise it to end the run in order, as `trainer.stop(reason)` does; gradients of an open window are dropped."""


class NonFiniteStop(StopRun):
    """`StopRun` for a value that is not finite, so that the other processes of the run count it as well."""


class Callback:
    """Base of everything that adds to training without being the loop.

    Override the events that you need; only those are called. Each receives the trainer, the task and the event's
    own values. An exception that a callback raises ends the run; the callback and the event are noted on it.
    """

    provides: Sequence[str] = ()
    """Names of metrics that this callback logs; it runs before those that need them."""
    needs: Sequence[str] = ()
    """Names of metrics that another callback must provide; it runs after that one, and the run can't begin without."""
    reads: Sequence[str] = ()
    """Names of metrics that this callback reads whoever logs them; it runs after the callbacks that provide them."""
    before: Sequence[type[Callback] | str] = ()
    """Classes (or their names) that this callback runs before."""
    after: Sequence[type[Callback] | str] = ()
    """Classes (or their names) that this callback runs after."""

    steers: bool = True
    """Whether this callback may skip a batch or a step, end the epoch, or stop the run. With False it can't, and the
    processes of a run need not ask each other for it at each step.
    """

    loads_from_disk: bool = False
    """Whether `load_state_dict` takes tensors on disk, as `StoredTensor`s, to read no more of them than it needs."""

    signals: Sequence[str] = ()
    """Names of signals, such as "SIGUSR1", at which a training ends in order, as it does at SIGTERM."""

    @property
    def plan_note(self) -> str | None:
        """What this callback will leave behind, in a few words: the plan of a run shows it."""
        return None

    @property
    def schedule(self) -> Interval | None:
        """When this callback does its main work, where an interval says so: the plan of a run shows it."""
        return None

    @property
    def checkpoint_folder(self) -> Path | None:
        """Where this callback keeps checkpoints, if that is not in the folder of the run: `resume_from="latest"` looks
        there.
        """
        return None

    @property
    def state_key(self) -> str:
        """The name under which `state_dict()` is saved; made unique where two callbacks share it."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: a mapping of JSON scalars, lists, mappings and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def rollback_state(self) -> Any:
        """What of this callback goes back together with the weights when `RollBack` goes back to an earlier step, which
        has to copy it: nested mappings and lists of numbers and tensors. None: nothing of it does.
        """
        return None

    def roll_back(self, trainer: TrainerView, state: Any) -> None:
        """Put back what `rollback_state` gave; it is this callback's to keep. The counters are back already."""

    def evaluation_weights(self, trainer: TrainerView, task: TaskView) -> AbstractContextManager[None] | None:
        """A context in which the task has the weights that are to be evaluated and saved in the place of those of the
        training; None: none are.

        The Trainer asks before each validation inside `fit`, and for what `save_model` writes during it. On leaving,
        the training's weights have to be back bit for bit, also after an exception. Whole states are never saved
        inside.
        """
        return None

    # What follows are the events, in the order in which they fire.

    def on_setup(self, trainer: TrainerView, task: TaskView) -> None:
        """First of all, in fit, validate, test and predict: before the model is placed and optimizers exist."""

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Model, optimizers and loaders are ready; nothing has run."""

    def on_epoch_start(self, trainer: TrainerView, task: TaskView) -> None:
        """An epoch begins; its first batch is not fetched yet."""

    def on_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Before `training_step`; the batch is on the device. It may be changed in place, or skipped by `SkipBatch`."""

    def on_before_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """After `training_step`, before backward; `loss` is as the task returned it, undivided and unscaled."""

    def on_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """After backward; gradients may still be scaled (fp16) and belong to an open window."""

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        """Gradients are whole, unscaled and clipped; they may be read or changed. `SkipBatch` drops the step."""

    def on_step(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        """After the optimizer step, with `APPLIED` or `SKIPPED`; `state.step` is up to date, gradients still exist."""

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """A micro-batch is done; `outputs` is what `training_step` returned."""

    def on_validation_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Validation begins, in eval mode and without gradients. What is tried before training fires no event."""

    def on_validation_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Before `validation_step`."""

    def on_validation_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """After `validation_step`, with what it returned."""

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """Validation is done; `metrics` are its means over all its data. A metric added to it is seen by later ones."""

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """The epoch is done; `metrics` are the training means of the epoch with the newest validation's."""

    def on_test_start(self, trainer: TrainerView, task: TaskView) -> None:
        """`trainer.test` begins."""

    def on_test_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Before `test_step`."""

    def on_test_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """After `test_step`, with what it returned."""

    def on_test_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """`trainer.test` is done."""

    def on_predict_start(self, trainer: TrainerView, task: TaskView) -> None:
        """`trainer.predict` begins."""

    def on_predict_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Before `predict_step`."""

    def on_predict_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """After `predict_step`, with what it returned."""

    def on_predict_end(self, trainer: TrainerView, task: TaskView) -> None:
        """`trainer.predict` is done."""

    def on_stop(self, trainer: TrainerView, task: TaskView) -> None:
        """The run ends at this step boundary, in order; nothing of the running epoch was closed yet. A checkpoint that
        is asked for here goes on as if the run had not ended.
        """

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Training is over, in order or by an exception (`trainer.error` says which)."""

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        """A record is about to go to the trackers; more metrics may be added to `metrics` here."""

    def on_save_state(self, trainer: TrainerView, task: TaskView, state: dict[str, Any]) -> None:
        """A checkpoint is being put together; entries may be added."""

    def on_saved(self, trainer: TrainerView, task: TaskView, path: Path) -> None:
        """A checkpoint is whole, under its own name; one that was written in the background at the next boundary."""

    def on_load_state(self, trainer: TrainerView, task: TaskView, state: dict[str, Any]) -> None:
        """A checkpoint has been read; what `on_save_state` added is there."""

    def on_exception(self, trainer: TrainerView, task: TaskView, error: BaseException) -> None:
        """An exception is about to end the run. It can't be swallowed here."""

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        """Last of all, also after an exception: free what `on_setup` took."""
