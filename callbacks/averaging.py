"""`WeightAveraging`: what `EMA` and `SWA` share: when averages are taken, who sees them, how they are saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..checkpoint.stored import read_all
from ..distributed.errors import CheckpointError, ConfigError, check_boolean
from ..distributed.exchange import exchange
from ..strategies.optimizer import parameters_of
from .averages import Averages
from .callback import Callback
from .intervals import Duration, Interval, IntervalLike, Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..strategies.outcome import StepOutcome
    from .limits import Limits
    from .state import RunState
    from .view import TaskView, TrainerView


class WeightAveraging(Callback, ABC):
    """Base of the callbacks that average weights.

    Once `start` is reached an average is taken at each point of `every` that lies behind it, after the optimizer step
    that leads there; steps that were skipped count for nothing. In the run's validations and in what `save_model`
    writes the averages then stand in the place of the weights, which come back bit for bit. Training itself never sees
    them, and whole checkpoints hold both, each once.

    Args:
        every: when an average is taken: whole optimizer steps or epochs.
        start: when averaging begins: a duration, or a fraction of the run by the nearest of its limits.
        use_buffers: whether buffers are averaged as well; see `Averages`.
        evaluates: whether validations and `save_model` see the averages.
        stays: whether a run that ends in order leaves the averages in the task.
    Raises:
        ConfigError: an argument can't be used.
    """

    steers = False
    before = ("ModelCheckpoint",)  # so that what it saves is up to date
    loads_from_disk = True

    def __init__(
        self, every: IntervalLike, start: Duration | float, *, use_buffers: bool, evaluates: bool, stays: bool
    ) -> None:
        check_boolean(f"{self._name}(evaluates)", evaluates)
        self._every = read_every(every, f"{self._name}(every)")
        self._start = start
        self._use_buffers = use_buffers
        self.evaluates = evaluates
        self._stays = stays
        self._task: Any = None
        self._loaded: dict[str, Any] | None = None
        self._is_finished = False
        self._forget()

    def _forget(self) -> None:
        self._averages: Averages | None = None
        self._schedule: Schedule | None = None  # only while a training goes on
        self._newest_step: int | None = None
        self.num_averaged = 0
        """Averages taken so far."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages by the names of what they average, on its devices, for reading. Empty before there are any."""
        return MappingProxyType({} if self._averages is None else self._averages.tensors)

    def applied_to(self, task: nn.Module) -> AbstractContextManager[None]:
        """A context in which a task has the averages, as `evaluates` gives them to the run's validations. Its beginning
        is collective under DeepSpeed.

        Afterwards its own weights are back, bit for bit, also after an exception.

        Args:
            task: the one that was trained, or another of the same make.
        Raises:
            ConfigError: there are no averages yet, or they are of other weights.
        """
        if self._averages is None or not self.num_averaged:
            raise ConfigError(f"{self._name} has averaged nothing so far. Call fit first, or let it begin earlier.")
        return self._averages.applied_to(task)

    def evaluation_weights(self, trainer: TrainerView, task: TaskView) -> AbstractContextManager[None] | None:
        """The context in which the task has the averages, once there are any."""
        self._follow(trainer)
        is_shown = self._schedule is not None and self.evaluates and self.num_averaged > 0
        return self.applied_to(self._task) if is_shown else None

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Begin anew, or where the checkpoint ends.

        Raises:
            ConfigError: several callbacks are to evaluate their averages; or there is nothing to average.
            CheckpointError: the saved averages are of other weights.
        """
        rivals = [c for c in trainer.callbacks if isinstance(c, WeightAveraging) and c.evaluates]
        if len(rivals) > 1:
            names = ", ".join(type(rival).__name__ for rival in rivals)
            raise ConfigError(
                f"{names} would each evaluate their averages, of which a run has one. Keep one of them, "
                "and give the others evaluates=False."
            )
        if not trainer.shows_weights:
            raise ConfigError(
                f"{self._name} can't average weights that are elsewhere between two steps, such as on NVMe. Offload "
                "them to the CPU, or use strategy='fsdp'."
            )
        self._forget()
        self._task, self._is_finished = task, False
        self._schedule = Schedule(self._every, trainer.state)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._take_back(trainer, loaded)
        self._follow(trainer)

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        """Take in what is trained from now on, with the value that it has before its first step."""
        if self._averages is not None:
            self._averages.track(parameters_of(optimizer))

    def on_step(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        """Average, if that is due."""
        self._follow(trainer)

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Also where another callback ended the epoch or the run in `on_step`, so that this one did not hear of it."""
        self._follow(trainer)

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """Average, if that is due."""
        self._follow(trainer)

    def on_stop(self, trainer: TrainerView, task: TaskView) -> None:
        """An average of the epoch that ends here belongs into the checkpoint that is saved here."""
        self._follow(trainer)

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """The last moment at which the task is as in training."""
        self._follow(trainer)
        if self._stays and self._schedule is not None:
            self._prepare_end(task)

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        """Leave the averages in the task, if they are to stay. Collective then.

        Only here, when whatever is saved of the training was saved. A run that an exception or a signal ends keeps its
        training weights: it is to go on from them.
        """
        if self._schedule is None:
            return
        self._schedule = None
        if self._stays and trainer.error is None and _all_ended_in_order(trainer):
            self._finish(trainer, task)

    def on_save_state(self, trainer: TrainerView, task: TaskView, state: dict[str, Any]) -> None:
        """Refuse to pass averages off as the weights of a training.

        Raises:
            CheckpointError: the task has the averages since the end of its training.
        """
        if self._is_finished:
            raise CheckpointError(
                f"{self._name} has left the averages in the task, so that a training that goes on from this state "
                "would go on from them. Let ModelCheckpoint save the state during fit; save_model writes the averages."
            )

    @abstractmethod
    def _share(self) -> float:
        """How far the averages move to the weights."""

    def _begin(self, trainer: TrainerView) -> None:
        """Averaging begins here."""

    def _average(self, trainer: TrainerView) -> None:
        """Take an average."""
        assert self._averages is not None
        self._averages.update(self._share())

    def _prepare_end(self, task: TaskView) -> None:
        """Note what `_finish` needs of a task that is still in training."""

    def _finish(self, trainer: TrainerView, task: TaskView) -> None:
        """Leave the averages in the task. Collective."""
        if self._averages is None or not self.num_averaged:
            return
        with self._averages.applied_to(self._task, stay=True):
            self._complete(trainer, task)
        self._is_finished = True

    def _complete(self, trainer: TrainerView, task: TaskView) -> None:
        """Fit the rest of the task to the averages that it has now. Collective."""

    def _follow(self, trainer: TrainerView) -> None:
        """Do what is due at this boundary; once, however often it is called there."""
        if self._schedule is None:
            return
        state = trainer.state
        if self._newest_step is None:
            if not self._has_started(state, trainer.limits):
                self._schedule.is_due(state)  # moves on to the next point
                return
            self._newest_step = state.step
            self._begin(trainer)
        if self._schedule.is_due(state) and state.step > self._newest_step:
            self._newest_step = state.step
            self._average(trainer)
            self.num_averaged += 1

    def _has_started(self, state: RunState, limits: Limits) -> bool:
        start = self._start
        if isinstance(start, Duration):
            return start.is_reached(state)
        return start == 0 or any(limit.count(state) + 1e-9 >= start * limit.amount for limit in limits.durations)

    def _make_averages(self, trainer: TrainerView) -> None:
        """Averages that begin with the weights as they are now."""
        trained = [p for optimizer in trainer.optimizers for p in parameters_of(optimizer) if p.requires_grad]
        if not trained:
            raise ConfigError(
                f"{self._name} found nothing to average: no optimizer has a parameter that is trained. Return one from "
                "`configure_optimizers`, or leave the callback out."
            )
        self._averages = Averages(
            self._task, self._name, use_buffers=self._use_buffers, part=trainer.weight_part, show=trainer.show_parts
        )
        self._averages.track(trained)

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            loaded: dict[str, Any] = read_all(self._loaded)
            return loaded
        return {
            "num_averaged": self.num_averaged,
            "newest_step": self._newest_step,
            "use_buffers": self._use_buffers,
            "averages": None if self._averages is None else dict(self._averages.tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved until the run begins, which has the weights."""
        self._loaded = state

    def rollback_state(self) -> dict[str, Any]:
        """The averages and where they stand."""
        return self.state_dict()

    def roll_back(self, trainer: TrainerView, state: dict[str, Any]) -> None:
        """Put them back."""
        self._averages = None
        self._schedule = Schedule(self._every, trainer.state)
        self._take_back(trainer, state)

    def _take_back(self, trainer: TrainerView, state: dict[str, Any]) -> None:
        self.num_averaged, self._newest_step = state["num_averaged"], state["newest_step"]
        if state["averages"] is not None:
            self._make_averages(trainer)
            assert self._averages is not None
            self._averages.load(state["averages"], buffers=state.get("use_buffers", False))


def read_every(every: IntervalLike, option: str) -> Interval:
    """The interval, if it counts what weights change with.

    Raises:
        ConfigError: it can't be read, or counts something else.
    """
    interval = Interval.parse(every, unit="steps", option=option)
    is_usable = not (interval.is_never or interval.first or interval.last)
    if not is_usable or any(d.unit not in ("steps", "epochs") or not d.is_whole for d in interval.every):
        raise ConfigError(
            f"{option}={every!r}. Expected whole optimizer steps or epochs, such as '10 steps' or '1 epoch'."
        )
    return interval


def _all_ended_in_order(trainer: TrainerView) -> bool:
    """Whether no process has got a signal. Collective."""
    own = trainer.signal is None
    return own if trainer.process.num_processes == 1 else all(exchange(own, "leave averages in the task"))
