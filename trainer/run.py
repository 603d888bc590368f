"""`Run`: everything that one call of `fit`, `validate`, `test` or `predict` works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.bus import Emit, Event
from ..callbacks.callback import Callback, ControlFlow, EndEpoch, SkipBatch, StopRun
from ..callbacks.intervals import Schedule
from ..callbacks.limits import Limits
from ..callbacks.state import RunState
from ..callbacks.synchronizations import SynchronizationCounter
from ..data.loader import PreparedLoader
from ..data.window import Remainder, WindowReader
from ..distributed import watch
from ..distributed.errors import ConfigError
from ..distributed.numbers import to_numbers
from ..strategies.gradient_state import GradientState
from ..strategies.optimizer import GatedOptimizer
from ..strategies.precision import Precision
from ..strategies.recompiling import Recompilations
from ..strategies.strategy import Strategy
from ..trackers.group import TrackerGroup
from .agreement import Agreement
from .clock import RunClock
from .loss import WindowLoss
from .metrics import MetricLog
from .optimization import SchedulerConfig
from .overhead import OverheadBudget
from .saves import Saves
from .task import Task

if TYPE_CHECKING:
    from .auto_accumulate import Splitting
    from .resume import Resumption
    from .trainer import Trainer

logger = logging.getLogger("loopwright")

WINDOW = ("batch", "micro_step", "samples", "tokens", "step", "skipped_steps", "epoch")
"""The counters that a window moves on."""


@dataclass(slots=True)
class EvaluationData:
    """The loaders of one stage of evaluation."""

    loaders: dict[str, PreparedLoader]
    """By the suffix that their metrics' names get; `""` for the only one."""
    limits: list[int | None]
    """Batches that this process takes of each, None: all."""
    process_index: int = 0
    """Which share of each this process gets."""
    num_processes: int = 1
    """How many shares there are."""
    is_first_peer: bool = True
    """Whether it is the first of those that get the same batches."""

    def number_of(self, index: int) -> int:
        """The number of this process's batch in its loader, counted over all processes."""
        return index * self.num_processes + self.process_index

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass, None where a loader has no length and no limit."""
        total = 0
        for loader, limit in zip(self.loaders.values(), self.limits, strict=True):
            count = limit if loader.length is None else min(loader.length, loader.length if limit is None else limit)
            if count is None:
                return None
            total += count
        return total


@dataclass(slots=True)
class Training:
    """What `fit` needs beyond an evaluation."""

    loader: PreparedLoader
    num_batches: int | None
    """Micro-batches in an epoch of this process, None where the loader has no length."""
    batch_limit: int | None
    """Micro-batches after which an epoch ends, None: all."""
    window_size: int
    remainder: Remainder
    is_automatic: bool
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    limits: Limits
    clip_norm: float | None
    clip_value: float | None
    log_schedule: Schedule
    val_schedule: Schedule
    validation: EvaluationData | None
    sanity_batches: int
    step: Callable[[Any, int], Any]
    """`training_step`, in the run's precision."""
    count_samples: Callable[[Any], int | None]
    """Samples in a batch."""
    count_tokens: Callable[[Any], int] | None
    """Tokens in a batch, None where the task does not report them."""
    needs_tokens: bool
    """Whether the token counter has to be exact at each step."""
    gated: list[GatedOptimizer] = field(default_factory=list)
    """The optimizers as a task in manual mode sees them."""
    loss: WindowLoss = field(default_factory=WindowLoss)
    splitting: Splitting | None = None
    """What trains batches in parts where memory runs out; None: that ends the run."""
    reader: WindowReader | None = None
    """The windows of the running epoch."""
    carried: int = 0
    """Micro-batches in a window that an epoch's end left open."""
    closed_early: bool = False
    """Whether the run's end closed such a window, which another epoch would have gone on with."""
    wait_seconds: float = 0.0
    """Time spent waiting for data in the passes that are over."""
    tokens: Any = 0
    """Tokens on the device that the counter does not have yet."""
    validated_at: tuple[int, int] | None = None
    """The micro-step and the step of the newest validation."""
    validation_due: bool = False
    """Whether a validation came due that is not finished."""
    passes: int = 0
    """Micro-batches of the newest window that went backward here, or were sat out."""
    agreed: list[Callable[[], None]] = field(default_factory=list)
    """What callbacks do once it is certain on all processes that the step is applied."""
    is_stepping: bool = False
    """Whether the optimizer's step goes on, which leaves weights half done if it fails."""
    began_at: tuple[int, ...] = ()
    """The counters of `WINDOW` where the newest window began."""
    opened_at: tuple[int, ...] | None = None
    """The same of the open window; None at a boundary."""
    is_last_window: bool = False
    """Whether the newest window is the last of its pass."""
    is_served: bool = True
    """Whether everything was done that came due at the newest boundary."""
    data_position: Mapping[str, Any] | None = None
    """Where the data was at the run's end, once its loader was let go."""
    held_positions: Mapping[str, Any] | None = None
    """The same of the validation's loaders."""
    logged_at: int = -1
    """The micro-step of the newest step record."""
    last_values: dict[str, Any] = field(default_factory=dict)
    """What the newest window of an epoch logged, where the run's last step is to be recorded."""
    last_values_at: int = -1
    """The micro-step at which these were taken."""
    step_schedulers: list[SchedulerConfig] = field(init=False)
    epoch_schedulers: list[SchedulerConfig] = field(init=False)

    def __post_init__(self) -> None:
        self.step_schedulers = [rate for rate in self.schedulers if rate.interval == "step"]
        self.epoch_schedulers = [rate for rate in self.schedulers if rate.interval == "epoch"]

    def trained_nothing(self, run: Run) -> bool:
        """Take part in the passes of a micro-batch that others train in turns with this process, which has no loss in
        it. Collective where they do. Gives whether that is so: else it is the strategy that takes part.
        """
        return self.splitting is not None and self.splitting.train_nothing(run, self)

    def begin_schedules(self, state: RunState, due_since: Mapping[str, int] | None) -> None:
        """Let intervals count from the counters as they are now, or from those that `due_since` gave."""
        if due_since is not None:
            self.is_served, self.began_at = False, tuple(due_since[name] for name in WINDOW)
            earlier: dict[str, Any] = {"epoch_ended": False, **due_since}
            state = replace(state, **earlier)
        self.log_schedule = Schedule(self.log_schedule.interval, state)
        self.val_schedule = Schedule(self.val_schedule.interval, state)

    def position(self, state: RunState) -> Mapping[str, Any]:
        """Where the data stands at the newest boundary, as `PreparedLoader.resume` takes it."""
        if self.data_position is not None:
            return self.data_position
        boundary = self.boundary(state)
        return self.loader.position(boundary["batch"], epoch=boundary["epoch"])

    def validation_positions(self) -> Mapping[str, Any]:
        """Where the loaders of the validation stand between its passes, by their suffixes."""
        if self.held_positions is not None:
            return self.held_positions
        if self.validation is None:
            return {}
        return {suffix: loader.position(0) for suffix, loader in self.validation.loaders.items()}

    def resume_validation(self, positions: Mapping[str, Any]) -> None:
        """Let the loaders of the validation go on with the pass that was next."""
        for suffix, loader in () if self.validation is None else self.validation.loaders.items():
            if suffix in positions:
                loader.resume(positions[suffix])

    def resume_data(self, state: RunState, position: Mapping[str, Any]) -> list[str]:
        """Let the data go on behind a position. Returns sentences on what can't be equal bit for bit."""
        inexact = self.loader.resume(position)
        state.batch = self.loader.first_batch
        return inexact

    def boundary(self, state: RunState) -> dict[str, int]:
        """The counters at the newest boundary: a window that is open since then will be trained again."""
        counters = state.counters()
        if self.opened_at is not None:
            counters |= zip(WINDOW, self.opened_at, strict=True)
        return counters

    def due_since(self, state: RunState) -> dict[str, int] | None:
        """The counters of the boundary before the newest one, where what came due at that is still to be done."""
        if self.opened_at is not None or self.is_served:
            return None
        return state.counters() | dict(zip(WINDOW, self.began_at, strict=True))

    def has_validated(self, state: RunState) -> bool:
        """Whether the weights as they are now were validated: nothing was trained since, or an open window has no step.

        Steps alone don't tell: a task in manual mode may train by optimizers that nobody counts.
        """
        if self.validated_at is None:
            return False
        micro_step, step = self.validated_at
        return step == state.step and (micro_step == state.micro_step or self.carried > 0)

    def windows_of(self, epoch: int, loader: PreparedLoader, *, begin: int = 0) -> WindowReader:
        """The windows of one epoch, behind its first `begin` batches. A window is left open only where another epoch
        can close it.
        """
        limit = self.limits.max_epochs
        is_last = limit is not None and epoch + 1 >= limit.amount
        return WindowReader(
            loader,
            self.window_size,
            remainder="flush" if self.remainder == "carry" and is_last else self.remainder,
            carried=self.carried,
            limit=self.batch_limit,
            begin=begin,
        )


@dataclass(slots=True)
class Run:
    """One run of a task. The loops are free functions over it; the Trainer shows parts of it."""

    trainer: Trainer
    task: Task
    model: nn.Module
    """The task as the strategy wrapped it."""
    events: dict[Event, Emit | None]
    state: RunState
    strategy: Strategy
    trackers: TrackerGroup
    training_log: MetricLog
    """What is logged in training."""
    log: MetricLog
    """What is logged in the stage that runs: training's, or that of the evaluation inside it."""
    training: Training | None = None
    evaluation: EvaluationData | None = None
    """What the evaluation that runs goes through."""
    outer_trainer: Trainer | None = None
    """Another Trainer that runs the task at the same time, around this run."""
    error: BaseException | None = None
    """The exception that is ending the run."""
    agreement: Agreement | None = None
    """What the processes decide together, None in one process."""
    saves: Saves = field(default_factory=Saves)
    """The checkpoints that were asked for."""
    clock: RunClock = field(default_factory=RunClock)
    """Where the time goes."""
    synchronizations: SynchronizationCounter = field(default_factory=SynchronizationCounter)
    """One for the whole run: handlers that are bound during it are called inside of others."""
    budget: OverheadBudget | None = None
    """What bookkeeping may take of it."""
    recompilations: Recompilations | None = None
    """What is compiled anew, None where nothing is compiled."""
    begins_again: bool = False
    """Whether this is the first leg although an earlier process may have begun it: it left no checkpoint."""
    resumption: Resumption | None = None
    """The checkpoint that the run goes on from."""
    shown_weights: ExitStack | None = None
    """While the task has the weights that a callback wants evaluated: what gives it those of the training back."""
    stop_reason: str | None = None
    signal: str | None = None
    """The signal that asked for the end of the run."""
    signalled_at: float | None = None
    """`time.monotonic()` when this process learned of it."""
    warned_of_samples: bool = False
    updated: dict[str, int] = field(default_factory=dict)
    """The micro-step at which each metric got its newest value."""

    @property
    def callbacks(self) -> list[Callback]:
        """Those of the trainer in their order; first the task, if it is one itself."""
        own = [self.task] if isinstance(self.task, Callback) else []
        return [*own, *self.trainer.callbacks]

    @property
    def precision(self) -> Precision:
        """The number formats of a step."""
        return self.strategy.precision

    @property
    def gradient_state(self) -> GradientState:
        """Where the current micro-batch stands in its window."""
        return self.strategy.gradient_state

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.strategy.device

    def emit(self, event: Event, *values: Any) -> None:
        """Fire an event outside the hot path."""
        if emit := self.events[event]:
            emit(*values)

    def release(self) -> None:
        """Let go of the data when the run is over: workers of the loaders end with them."""
        self.evaluation = None
        if self.recompilations is not None:
            self.recompilations.stop()
        if self.training is not None:
            self.training.data_position = self.training.position(self.state)
            self.training.held_positions = self.training.validation_positions()
            self.training.loader, self.training.validation, self.training.reader = PreparedLoader(()), None, None

    def stop(self, reason: str) -> None:
        """Ask for an orderly end at the next step boundary; the first reason stands."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def note_signal(self, name: str) -> None:
        """Remember that a signal asked for the end of the run, and since when that is known."""
        if self.signalled_at is None:
            self.signalled_at = time.monotonic()
        self.signal = name

    def heed(self, stop: StopRun) -> None:
        """Ask for it as somebody did by raising `StopRun`."""
        self.stop(str(stop) or "StopRun was raised")

    def stop_everywhere(self, reason: str) -> None:
        """End the run at this boundary, for a reason that every process finds by itself."""
        self.stop(reason)
        if self.agreement is not None:
            self.agreement.consensus.stops = True

    def steered(self) -> AbstractContextManager[None]:
        """A context that callbacks may stop the run from, on one process as well: all do then."""
        return nullcontext() if self.agreement is None else self.agreement.following()

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends at this boundary: with several processes, whether all have agreed to."""
        return self.stop_reason is not None if self.agreement is None else self.agreement.consensus.stops

    @property
    def has_ended_epoch(self) -> bool:
        """Whether the newest boundary is the last of its epoch, also where the run ends before that was noted."""
        training = self.training
        if self.state.epoch_ended or training is None or training.opened_at is not None or training.is_served:
            return self.state.epoch_ended
        if training.began_at[-1] != self.state.epoch:
            return False
        return training.is_last_window or (self.agreement is not None and self.agreement.consensus.ends_pass)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the run goes on inside an epoch of the leg before, and has not done so yet."""
        return self.resumption is not None and self.resumption.is_inside_epoch

    @property
    def ends_pass(self) -> bool:
        """Whether no further window of this pass is trained."""
        return self.is_stopping or (self.agreement is not None and self.agreement.consensus.ends_pass)

    def fail(self, error: BaseException) -> None:
        """Tell the callbacks, once, of the exception that is ending the run. Control flow is none."""
        if self.error is None and not isinstance(error, ControlFlow):
            self.error = error
            if self.agreement is not None:
                watch.announce_failure(error)
            self.finish_despite(error, Callback.on_exception, error)

    def finish_despite(self, error: BaseException, event: Event, *values: Any) -> None:
        """Fire an end event while `error` is on its way out: it stays the run's error, whatever else fails."""
        try:
            self.emit(event, *values)
        except Exception as another:
            if isinstance(error, ControlFlow) and not isinstance(another, ControlFlow):
                raise
            error.add_note(f"then {event.__name__} failed as well: {type(another).__name__}: {another}")
            logger.error("%s failed while the run was ending", event.__name__, exc_info=another)

    def paired(
        self, start: Event, end: Event, end_values: Callable[[], Sequence[Any]] = tuple, *, holds_stop: bool = False
    ) -> Paired:
        """A context that fires a start event, and its end event however the body ends.

        Args:
            start: fired first.
            end: fired last; also when `start` or the body raises.
            end_values: gives the values of the end event.
            holds_stop: with several processes, `StopRun` out of the start event only asks for the end of the run, and
                is `held` for the body, which agrees on it with the others.
        """
        return Paired(self, start, end, end_values, holds_stop and self.agreement is not None)

    def record(self, values: Mapping[str, Any], *, is_of_step: bool = False) -> dict[str, float]:
        """Make one record of logged values: on the host, shown to callbacks, sent to the trackers.

        Args:
            values: by name.
            is_of_step: trackers need not get it where it would take them over their budget.
        """
        self.read_tokens()
        metrics = to_numbers(values)
        step = self.state.step
        metrics["epoch"] = self.state.epochs_done
        stop: StopRun | None = None
        try:
            with refused(SkipBatch, EndEpoch):
                self.emit(Callback.on_log, metrics, step)
        except StopRun as asked:  # the record stands, on this process as on those that only follow
            stop = asked
        if not is_of_step or self.budget is None or self.budget.allows(self.clock):
            with self.clock.part("trackers"):
                self.trackers.log(metrics, step)
        self.remember(metrics)
        if stop is not None:
            raise stop
        return metrics

    def read_tokens(self) -> None:
        """Bring the tokens that were counted on the device into the counter."""
        if self.training is not None and isinstance(self.training.tokens, Tensor):
            self.state.tokens += int(self.training.tokens.item())
            self.training.tokens = 0

    def remember(self, metrics: Mapping[str, float]) -> None:
        """Make these the newest values."""
        self.trainer.metrics.update(metrics)
        self.updated.update(dict.fromkeys(metrics, self.state.micro_step))


class Paired:
    """What `Run.paired` gives. No generator: that would make a RuntimeError of a callback's StopIteration."""

    __slots__ = ("_end", "_end_values", "_holds_stop", "_run", "_start", "held")

    def __init__(
        self, run: Run, start: Event, end: Event, end_values: Callable[[], Sequence[Any]], holds_stop: bool
    ) -> None:
        self._run, self._start, self._end, self._end_values = run, start, end, end_values
        self._holds_stop = holds_stop
        self.held: StopRun | None = None

    def __enter__(self) -> None:
        try:
            self._emit(self._start)
        except BaseException as error:
            if self._holds_stop and isinstance(error, StopRun):
                self.held = error
                self._run.heed(error)
                return
            self._end_despite(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._end_despite(error)
            return
        try:
            self._emit(self._end, *self._end_values())
        except BaseException as failure:
            self._run.fail(failure)
            raise

    def _emit(self, event: Event, *values: Any) -> None:
        watch.stand(event.__name__, self._run.state.step)
        self._run.emit(event, *values)

    def _end_despite(self, error: BaseException) -> None:
        self._run.fail(error)
        self._run.finish_despite(error, self._end, *self._end_values())


@contextmanager
def refused(*kinds: type[ControlFlow]) -> Iterator[None]:
    """A context out of which these kinds of control flow come as an error, since nobody has served them."""
    try:
        yield
    except kinds as error:
        raise misplaced(error) from error


PLACES: dict[type[ControlFlow], str] = {
    SkipBatch: "on_batch_start, training_step, on_before_backward or on_before_step",
    EndEpoch: "an event of a batch of training, or in training_step",
    StopRun: "an event inside fit, or in training_step",
}
"""Where control flow may be raised."""


def misplaced(error: ControlFlow) -> ConfigError:
    """The error that takes the place of control flow which nobody can serve."""
    return ConfigError(f"{type(error).__name__} has no effect where it was raised. Raise it in {PLACES[type(error)]}.")
