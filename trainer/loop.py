"""The training loop.

```
fit:        on_setup -> on_fit_start -> epochs -> on_fit_end -> on_teardown
fit_epoch:  on_epoch_start -> windows, and after each what is due -> on_epoch_end(metrics)
fit_window: the micro-batches of one optimizer step
fit_batch:  on_batch_start -> training_step -> on_before_backward -> backward -> on_backward
            and at the window's end: unscale, clip -> on_before_step -> optimizer.step -> on_step -> scheduler.step,
            zero_grad -> on_batch_end(outputs)
```

Every function works on a `Run` and knows no concrete strategy, tracker or callback. Events that nobody handles are
None. With several processes `run.agreement` decides what all of them do; in one process it is None.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun
from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import Window, WindowReader
from ..distributed.errors import DataError, TaskError
from ..distributed.numbers import to_numbers
from ..strategies.optimizer import parameters_of
from ..strategies.outcome import StepOutcome
from .evaluation import sanity_check, validate
from .optimization import SchedulerConfig, monitored_value
from .run import Run, Training, misplaced, refused
from .saves import announce_stop, save_what_was_asked


def fit(run: Run, training: Training) -> None:
    """Train until a limit is reached or a stop is asked for."""
    state = run.state
    forget_gradients(run, training)  # those of an earlier run, which ended in the middle of a window
    if run.resumption is not None:
        run.resumption.restore_gradients(run)
    try:
        with run.paired(Callback.on_fit_start, Callback.on_fit_end, holds_stop=True), refused(SkipBatch, EndEpoch):
            if training.validation and training.sanity_batches and run.resumption is None:
                sanity_check(run, training.validation, training.sanity_batches)
            state.stage = "train"
            state.start()
            if run.agreement is not None:
                run.agreement.settle()
            if run.resumption is not None and not run.resumption.is_inside_epoch:
                run.resumption.restore_random(run)
            while not run.is_stopping:
                if limit := training.limits.reached(state):
                    run.stop_everywhere(f"{limit} reached")
                if not run.is_stopping or run.is_inside_epoch:
                    fit_epoch(run, training)  # of which nothing is left to train where a limit is reached: it is closed
                    save_what_was_asked(run, training)
            if run.resumption is not None and run.is_inside_epoch:
                run.resumption.restore_inside(run)  # which this leg did not come to: what is saved now stands there
            if not training.carried:
                announce_stop(run, training)
            close_open_window(run, training)
            announce_stop(run, training)
            do_what_is_due_last(run, training)
    except StopRun as stop:
        run.heed(stop)
    record_late(run)
    save_what_was_asked(run, training)
    run.saves.are_over = True


def fit_epoch(run: Run, training: Training) -> None:
    """One pass over the training data."""
    state = run.state
    goes_on = run.resumption is not None and run.resumption.enter_epoch()
    reader = open_pass(run, training, goes_on=goes_on)
    windows = iter(reader)
    metrics = run.trainer.metrics
    try:
        try:
            with run.paired(Callback.on_epoch_start, Callback.on_epoch_end, lambda: (dict(metrics),), holds_stop=True):
                try:
                    window = None if state.epoch_ended else first_window(run, training, windows)
                    if goes_on:
                        go_on_inside(run, training)
                        window = None if run.ends_pass else window
                    while window is not None:
                        fit_window(run, training, window)
                        if not served_what_is_due(run, training):
                            break
                        window = None if run.ends_pass else next(windows, None)
                    if state.batch == 0 and not run.is_stopping:
                        refuse_empty_pass(run, training, reader)
                except EndEpoch:
                    cut_epoch(run, training)
                except StopRun as stop:
                    run.heed(stop)
                    drop_open_window(run, training)
                if run.is_stopping and not (state.epoch_ended and training.is_served):
                    announce_stop(run, training)  # before what is left of the epoch is closed: it may go on one day
                close_epoch(run, training, reader)
        except StopRun as stop:  # from the epoch's own events and its record
            run.heed(stop)
        record_late(run)
        if run.agreement is not None:
            run.agreement.settle()  # on whether another epoch follows
    finally:
        windows.close()  # the workers that read for it end now, whoever keeps the exception that ended it
        if state.epoch_ended and training.reader is None:  # and closed: else a run that goes on closes it
            state.epoch += 1
            state.batch = 0
            state.epoch_ended = False


def open_pass(run: Run, training: Training, *, goes_on: bool) -> WindowReader:
    """The windows of the epoch that begins, or of what is left of it where a resumed run goes on inside."""
    state = run.state
    if not goes_on:
        state.epoch_ended = False
        state.batch = 0
    training.loader.set_epoch(state.epoch)
    training.reader = training.windows_of(state.epoch, training.loader, begin=state.batch)
    if not training.carried:
        run.training_log.window = state.micro_step  # what `on_epoch_start` logs belongs to the first window
    return training.reader


def go_on_inside(run: Run, training: Training) -> None:
    """What comes first where a resumed run goes on inside an epoch."""
    assert run.resumption is not None
    run.resumption.restore_inside(run)  # without what `on_epoch_start` has logged a second time
    if training.validation_due or not training.is_served:  # also where the run ends here: before its epoch's record
        do_what_is_due(run, training)


def cut_epoch(run: Run, training: Training) -> None:
    """End an epoch at `EndEpoch`: this boundary is its last."""
    drop_open_window(run, training)
    training.opened_at = None
    run.state.epoch_ended = True
    try:
        do_what_is_due(run, training)
    except StopRun as stop:  # the epoch is closed all the same
        run.heed(stop)


def first_window(run: Run, training: Training, windows: Iterator[Window]) -> Window | None:
    """The first window of a pass, None where it has none or the run is to stop before it."""
    window = next(windows, None)
    if run.agreement is not None:
        return run.agreement.begin_pass(training, window)
    return None if run.is_stopping else window


def fit_window(run: Run, training: Training, window: Window) -> None:
    """The micro-batches of one optimizer step. Gradients are reduced over processes in the last one's backward."""
    gradient_state, agreement = run.strategy.gradient_state, run.agreement
    if not training.carried:
        # Processes whose data does not divide evenly may have windows of different length: one divisor for all of them.
        size = window.size if agreement is None or training.loader.is_even else training.window_size
        training.loss.begin(size)
        gradient_state.window_size = size
        run.training_log.window = run.state.micro_step
    if agreement is not None:
        window = agreement.open_window(training, window)
    if not training.carried:
        state = run.state
        training.opened_at = training.began_at = (
            state.batch, state.micro_step, state.samples, state.tokens, state.step, state.skipped_steps, state.epoch,
        )  # fmt: skip
    last = len(window.batches) - 1
    num_gathered = last if window.closes else last + 1  # micro-batches that reduce nothing
    training.passes = 0
    training.is_served, training.is_last_window = False, window.is_last
    try:
        if num_gathered:
            gradient_state.sync_gradients = False
            with run.strategy.no_sync(run.model):
                for position in range(num_gathered):
                    fit_batch(run, training, window, position)
        if window.closes:
            gradient_state.sync_gradients = True
            fit_batch(run, training, window, last)
    except (EndEpoch, StopRun) as flow:
        if agreement is None:
            raise
        with run.strategy.no_sync(run.model):
            for _ in range(training.passes, num_gathered):
                run.strategy.sit_out(run.model)
        agreement.leave(training, flow)
    if window.closes:
        training.opened_at = None
    training.carried = 0 if window.closes else training.carried + len(window.batches)
    run.state.epoch_ended = window.is_last if agreement is None else agreement.close_window()


def fit_batch(run: Run, training: Training, window: Window, position: int) -> None:
    """Forward and backward of one micro-batch, and the optimizer step if it closes its window."""
    events, state, log = run.events, run.state, run.training_log
    index = state.batch
    outputs = loss = None
    samples: int | AmbiguousBatchSizeError | None
    reader = training.reader
    assert reader is not None
    batch = window.batches[position] if reader.transfer is None else reader.on_device(window, position)
    try:
        samples = log.samples = training.count_samples(batch)
    except AmbiguousBatchSizeError as error:  # raised where the number is needed
        samples = log.samples = not_counted(run, error)
    if run.agreement is not None:
        run.agreement.count(samples, 0 if training.count_tokens is None else training.count_tokens(batch))
    try:
        try:
            if emit := events[Callback.on_batch_start]:
                emit(batch, index)
            if training.is_automatic:
                outputs = training.step(batch, index)
                loss = training.loss.take(outputs)
                if loss is not None:
                    backward(run, loss)
                    training.passes += 1
            else:
                outputs = manual_step(run, training, batch, index)
        except SkipBatch:
            outputs = None  # a batch without a loss
            if loss is not None:
                training.loss.leave_out()
        if training.passes == position and not run.strategy.gradient_state.sync_gradients:
            sit_out(run, training)
        try:
            if training.is_automatic and run.strategy.gradient_state.sync_gradients:
                step(run, training)
        except BaseException as error:
            was_left = run.agreement is not None and run.agreement.was_left
            if training.opened_at is None or (isinstance(error, (EndEpoch, StopRun)) and not was_left):
                count_batch(run, training, batch, samples)
            raise
        count_batch(run, training, batch, samples)
    except BaseException as error:
        hint_at_single_sample(error, samples, index)
        run.fail(error)
        run.finish_despite(error, Callback.on_batch_end, outputs)
        raise
    if emit := events[Callback.on_batch_end]:
        emit(outputs)


def sit_out(run: Run, training: Training) -> None:
    """A micro-batch without a loss, in a window that goes on: other processes may have one."""
    if training.is_automatic and run.agreement is not None:
        run.strategy.sit_out(run.model)
        training.passes += 1


def count_batch(run: Run, training: Training, batch: Any, samples: object) -> None:
    """Count a micro-batch that is done."""
    state = run.state
    state.batch += 1
    state.micro_step += 1
    if run.agreement is not None:
        return  # it counts the samples and tokens of all processes
    if type(samples) is int:
        state.samples += samples
    if training.count_tokens is not None:
        state.tokens += training.count_tokens(batch)


def backward(run: Run, loss: Tensor, **kwargs: Any) -> None:
    """Backward with its two events. In a window's last one the processes' vectors travel along."""
    if emit := run.events[Callback.on_before_backward]:
        emit(loss)
    agreement = run.agreement
    if agreement is not None and agreement.is_last_backward:
        agreement.send()
    run.strategy.backward(loss, **kwargs)
    if emit := run.events[Callback.on_backward]:
        try:
            emit(loss)
        except SkipBatch as late:
            raise misplaced(late) from late
        except (EndEpoch, StopRun) as flow:
            if agreement is None or not agreement.is_sent:
                raise
            agreement.veto(flow)


def num_losses_everywhere(run: Run, training: Training) -> int:
    """The losses of the window that ends, on all processes. One without a loss adds zeros to their gradients."""
    agreement = run.agreement
    if agreement is None:
        return training.loss.num_losses
    if not agreement.is_sent:
        agreement.send()
        run.strategy.take_part(run.model)
    return agreement.receive(training)


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


def step(run: Run, training: Training) -> None:
    """The optimizer step at the end of a window, and what follows from its outcome."""
    optimizer = training.optimizers[0]
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


def manual_step(run: Run, training: Training, batch: Any, index: int) -> Any:
    """`training_step` of a task that steps its optimizers itself. One step is counted, however many it took."""
    for optimizer in training.gated:
        optimizer.outcome = StepOutcome.ACCUMULATED
    outputs = training.step(batch, index)
    training.opened_at = None
    outcomes = {optimizer.outcome for optimizer in training.gated}
    if StepOutcome.APPLIED in outcomes:
        count_step(run, training, StepOutcome.APPLIED)
    elif StepOutcome.SKIPPED in outcomes:
        count_step(run, training, StepOutcome.SKIPPED)
    return outputs


def do_what_is_due(run: Run, training: Training) -> None:
    """What comes due at a step boundary. A window that is left open has no step yet to record."""
    state = run.state
    if not training.carried and training.log_schedule.is_due(state) and training.logged_at != state.micro_step:
        record_step(run, training)
    if training.validation and (training.val_schedule.is_due(state) or training.validation_due):
        training.validation_due = not training.has_validated(state)
        if training.validation_due:
            with run.steered():
                validate(run, training)
    if training.limits.end_inside_epochs and (limit := training.limits.reached(state)):
        run.stop_everywhere(f"{limit} reached")
    training.is_served = True
    if not (run.saves.is_idle or state.epoch_ended or run.is_stopping):
        save_what_was_asked(run, training)


def record_step(run: Run, training: Training) -> None:
    """Make a record of the newest window. Where an exception prevents it, a run that goes on makes up for it."""
    before, training.logged_at = training.logged_at, run.state.micro_step
    try:
        with run.steered():
            run.record(run.training_log.step_values())
    except Exception as error:
        if not isinstance(error, StopRun):
            training.logged_at = before
        raise


def served_what_is_due(run: Run, training: Training) -> bool:
    """Do what comes due at a step boundary. Returns whether nothing raised `StopRun` there.

    A window that is carried over the epoch's end stays open then: the run's end steps on it, so that none of its
    batches is lost.
    """
    try:
        do_what_is_due(run, training)
    except StopRun as stop:
        run.heed(stop)
        return False
    return True


def do_what_is_due_last(run: Run, training: Training) -> None:
    """What comes due at the end of the run: a last validation where it is asked for, and the newest values."""
    state = run.state
    is_due = training.val_schedule.is_due_at_end or training.validation_due
    if training.validation and is_due and not training.has_validated(state):
        validate(run, training)
    if training.last_values and training.logged_at != state.micro_step and training.log_schedule.is_ever_due:
        training.logged_at = state.micro_step
        run.record(training.last_values)
    if training.validation and training.validated_at is None and training.limits.reached(state):
        warnings.warn(
            f"validation never ran: val_every='{training.val_schedule.interval}' did not come due in {state.step} "
            "steps. Count in steps, such as val_every='100 steps', or add 'last'.",
            stacklevel=2,
        )


def close_epoch(run: Run, training: Training, reader: WindowReader) -> None:
    """Finish an epoch: its training means become a record, and schedules that count epochs move on."""
    training.carried = reader.carried
    training.wait_seconds += reader.wait_seconds
    newest, values = run.training_log.close_epoch(keeps_window=training.carried > 0)
    if newest or training.last_values_at != run.state.micro_step:  # else a leg before has closed it
        training.last_values, training.last_values_at = newest, run.state.micro_step
    run.trainer.metrics.update(to_numbers(newest))
    if values and not training.validation_due:  # an epoch whose last validation was cut short is not over
        try:
            run.record(values)
        except StopRun as stop:  # the epoch is closed all the same
            run.heed(stop)
    if run.state.epoch_ended and run.state.epoch == 0 and (run.agreement is None or not run.agreement.had_loss):
        check_first_epoch(run, training)
    if run.state.epoch_ended and training.is_automatic:
        for rate in training.epoch_schedulers:
            step_scheduler(run, rate, run.state.epoch + 1)
    training.reader = None


def check_first_epoch(run: Run, training: Training) -> None:
    """A task whose first epoch trained nothing would go on so for hours.

    Raises:
        TaskError: automatic optimization never got a loss.
    """
    state, name = run.state, type(run.task).__name__
    if training.is_automatic and 0 < state.micro_step == training.loss.num_none:
        raise TaskError(
            f"no batch of the first epoch gave a loss: {name}.training_step returned None for all {state.micro_step}. "
            "Return the loss."
        )
    if not training.is_automatic and state.step + state.skipped_steps == 0:
        warnings.warn(
            f"no optimizer stepped in the first epoch. {name} has automatic_optimization = False: call "
            "self.manual_backward(loss) and step() of self.optimizers() in training_step.",
            stacklevel=2,
        )


def record_late(run: Run) -> None:
    """Record what an end event logged, whose own record is out already. `StopRun` out of `on_log` is heeded.

    A run that ended before it came to the epoch inside of which it was to go on leaves that epoch's values to the next.
    """
    if run.is_inside_epoch:
        return
    try:
        if values := run.training_log.late_values():
            run.record(values)
    except StopRun as stop:
        run.heed(stop)


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


def not_counted(run: Run, error: AmbiguousBatchSizeError) -> AmbiguousBatchSizeError:
    """Say once that the sample counter passes over batches whose number of samples can't be told."""
    if not run.warned_of_samples:
        run.warned_of_samples = True
        warnings.warn(f"state.samples does not count such batches: {error}", stacklevel=2)
    return error


def add_counts(run: Run, training: Training, count: Any) -> None:
    """Add a window's count to the token counter, without waiting for a device that computes it."""
    if isinstance(count, Tensor):
        if count.device.type != "cpu" and not training.needs_tokens:
            training.tokens = training.tokens + count
            return
        count = count.item()
    run.state.tokens += int(count)


def refuse_empty_pass(run: Run, training: Training, reader: WindowReader) -> None:
    """A pass without a window: an error in the first epoch, the end of the run later.

    Raises:
        DataError: there never was a batch, or all of them are left out.
    """
    if reader.num_fetched:
        raise DataError(
            f"an epoch has {reader.num_fetched} batches, fewer than accumulate={training.window_size}, and "
            "accumulate_across_epochs='drop' leaves them all out. Use 'flush' or 'carry', or a smaller accumulate."
        )
    if run.state.micro_step == 0:
        raise DataError(
            "the training loader gave no batch. Check its dataset, its sampler, drop_last and limit_batches."
        )
    warnings.warn(
        f"the training loader gave no batch in epoch {run.state.epoch}: it can be iterated only once. "
        f"Training ends at step {run.state.step}. Pass an iterable that begins anew each time.",
        stacklevel=2,
    )
    run.stop("the training data is used up")


def hint_at_single_sample(error: BaseException, samples: object, index: int) -> None:
    """Batch norm can't train on one sample, and torch does not say which batch that was."""
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        error.add_note(
            f"batch {index} has {samples} sample(s), too few for batch norm. Use drop_last=True in the DataLoader, "
            "or a batch size that does not leave a single sample at the end."
        )
