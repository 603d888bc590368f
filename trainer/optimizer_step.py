"""The optimizer step at the end of a window, what follows from its outcome, and windows that end in another way."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun
from ..strategies.optimizer import parameters_of
from ..strategies.outcome import StepOutcome
from .clock import now
from .optimization import SchedulerConfig, monitored_value
from .run import Run, Training


def step(run: Run, training: Training) -> None:
    """The optimizer step at the end of a window, and what follows from its outcome."""
    clock, optimizer = run.clock, training.optimizers[0]
    began, called = now(), clock.ledger.seconds
    outcome = StepOutcome.SKIPPED
    precision = run.strategy.precision
    if num_losses_everywhere(run, training):
        try:
            if not precision.scales or precision.unscale(optimizer):
                normalise_and_clip(run, training)
                announce_step(run, optimizer)
            training.is_stepping = True
            outcome = run.strategy.step(optimizer)
            training.is_stepping = False
        except SkipBatch:
            precision.forget(optimizer)
        if training.loss.count is not None:
            add_counts(run, training, training.loss.count)
    training.opened_at = None  # whatever comes now, the window is done
    count_step(run, training, outcome)
    optimizer.zero_grad()
    clock.step += now() - began - (clock.ledger.seconds - called)


def num_losses_everywhere(run: Run, training: Training) -> int:
    """The losses of the window that ends, on all processes. One without a loss adds zeros to their gradients."""
    agreement = run.agreement
    if agreement is None:
        return training.loss.num_losses
    if not agreement.is_sent:
        is_done = training.trained_nothing(run)
        agreement.send()
        if not is_done:
            run.strategy.take_part(run.model)
    return agreement.receive(training)


def normalise_and_clip(run: Run, training: Training) -> None:
    """Give the window's gradients their exact weight, then clip them once."""
    correction = training.loss.correction()
    if correction is None and training.clip_value is None and training.clip_norm is None:
        return
    parameters = parameters_of(training.optimizers[0])  # as it has them now: groups may be added in a run
    if correction is not None:
        run.strategy.scale_gradients(parameters, correction)
    if training.clip_value is not None:
        run.strategy.clip_grad_value(parameters, training.clip_value)
    if training.clip_norm is not None:
        run.strategy.clip_grad_norm(parameters, training.clip_norm)


def announce_step(run: Run, optimizer: Optimizer) -> None:
    """`on_before_step`, where callbacks may drop the step: all processes do then. Behind it comes what they have kept
    for the moment when nobody can drop it any more.
    """
    emit, agreement, training = run.events[Callback.on_before_step], run.agreement, run.training
    assert training is not None
    if training.agreed:  # of a step that was dropped
        training.agreed.clear()
    if agreement is None:
        if emit:
            emit(optimizer)
    else:
        try:
            if emit:
                emit(optimizer)
        except (SkipBatch, EndEpoch, StopRun) as flow:
            agreement.veto(flow)
        agreement.vote()
    for act in training.agreed:
        act()


def count_step(run: Run, training: Training, outcome: StepOutcome) -> None:
    """Count a step that was due, tell the callbacks, and move the schedules on if it was applied."""
    if outcome is StepOutcome.APPLIED:
        run.state.step += 1
    else:
        run.state.skipped_steps += 1
    try:
        if emit := run.events[Callback.on_step]:
            emit(outcome)
    finally:  # the step was taken, whatever a callback makes of it
        if outcome is StepOutcome.APPLIED and training.is_automatic:
            for rate in training.step_schedulers:
                step_scheduler(run, rate, run.state.step)


def add_counts(run: Run, training: Training, count: Any) -> None:
    """Add a window's count to the token counter, without waiting for a device that computes it."""
    if isinstance(count, Tensor):
        if count.device.type != "cpu" and not training.needs_tokens:
            training.tokens = training.tokens + count
            return
        count = count.item()
    run.state.tokens += int(count)


def manual_step(run: Run, training: Training, batch: Any, index: int) -> Any:
    """`training_step` of a task that steps its optimizers itself. One step is counted, however many it took."""
    for optimizer in training.gated:
        optimizer.outcome = StepOutcome.ACCUMULATED
    clock = run.clock
    began, inner = now(), clock.backward + clock.ledger.seconds
    outputs = training.step(batch, index)
    clock.forward += now() - began - (clock.backward + clock.ledger.seconds - inner)
    training.opened_at = None
    outcomes = {optimizer.outcome for optimizer in training.gated}
    if StepOutcome.APPLIED in outcomes:
        count_step(run, training, StepOutcome.APPLIED)
    elif StepOutcome.SKIPPED in outcomes:
        count_step(run, training, StepOutcome.SKIPPED)
    return outputs


def close_open_window(run: Run, training: Training) -> None:
    """Step on a window that was carried over an epoch's end and finds no further batch, over what it holds."""
    if training.carried:
        training.carried = 0
        training.closed_early = True
        training.logged_at = -1  # what was recorded before belongs to another step
        run.gradient_state.sync_gradients = True
        step(run, training)


def drop_open_window(run: Run, training: Training) -> None:
    """Forget the gradients of a window that will not be closed. Between windows those of a manual task stay."""
    is_open = training.is_automatic or training.opened_at is not None
    if training.carried or not run.is_stopping:
        training.opened_at = None  # it is left out; only a run that stops may train it again later, and not half of it
    training.carried = 0
    if training.reader is not None:
        training.reader.carried = 0
    if is_open:
        forget_gradients(run, training)


def forget_gradients(run: Run, training: Training) -> None:
    """Clear the gradients of all optimizers."""
    for optimizer in training.optimizers:
        run.strategy.forget_gradients(run.model, optimizer)


def step_scheduler(run: Run, rate: SchedulerConfig, count: int) -> None:
    """Step a schedule if `count` is one of its points."""
    if not rate.is_point(count) or run.state.step == 0:
        return
    if not rate.needs_metric:
        rate.scheduler.step()
    elif is_fresh(run, rate):
        rate.scheduler.step(monitored_value(rate, run.trainer.metrics))


def is_fresh(run: Run, rate: SchedulerConfig) -> bool:
    """Whether the metric that a schedule watches has a new value since the schedule saw it last.

    Raises:
        MetricError: the metric was never logged although validation has run.
    """
    assert rate.monitor is not None
    training = run.training
    assert training is not None
    if rate.monitor not in run.updated:
        if training.validation is None or training.validated_at is not None:
            monitored_value(rate, run.trainer.metrics)
        return False  # validation was not due before the run ended
    seen, rate.seen_at = rate.seen_at, run.updated[rate.monitor]
    return seen != rate.seen_at
