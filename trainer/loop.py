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

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun
from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import Window, WindowReader
from ..distributed.numbers import to_numbers
from .clock import now
from .data_checks import check_first_epoch, hint_at_single_sample, not_counted, refuse_empty_pass
from .due import do_what_is_due, do_what_is_due_last, record_late, served_what_is_due
from .evaluation import sanity_check
from .optimizer_step import close_open_window, drop_open_window, forget_gradients, manual_step, step, step_scheduler
from .run import Run, Training, misplaced, refused
from .saves import announce_stop, save_what_was_asked


def fit(run: Run, training: Training) -> None:
    """Train until a limit is reached or a stop is asked for."""
    forget_gradients(run, training)  # those of an earlier run, which ended in the middle of a window
    if run.resumption is not None:
        run.resumption.restore_gradients(run)
    try:
        with run.paired(Callback.on_fit_start, Callback.on_fit_end, holds_stop=True), refused(SkipBatch, EndEpoch):
            begin_training(run, training)
            while not run.is_stopping:
                if limit := training.limits.reached(run.state):
                    run.stop_everywhere(f"{limit} reached")
                if not run.is_stopping or run.is_inside_epoch:
                    fit_epoch(run, training)  # of which nothing is left to train at a limit: it is closed
                    save_what_was_asked(run, training)
            end_training(run, training)
    except StopRun as stop:
        run.heed(stop)
    record_late(run)
    save_what_was_asked(run, training)
    run.saves.are_over = True


def begin_training(run: Run, training: Training) -> None:
    """What comes before the first epoch: a trial of the validation, and where a run goes on its random states."""
    if training.validation and training.sanity_batches and run.resumption is None:
        sanity_check(run, training.validation, training.sanity_batches)
    run.state.stage = "train"
    run.state.start()
    if run.agreement is not None:
        run.agreement.settle()
    if run.resumption is not None and not run.resumption.is_inside_epoch:
        run.resumption.restore_random(run)


def end_training(run: Run, training: Training) -> None:
    """What comes behind the last epoch: a step on what a window holds that was left open, and what is due last."""
    if run.resumption is not None and run.is_inside_epoch:
        run.resumption.restore_inside(run)  # which this leg did not come to: what is saved now stands there
    if not training.carried:
        announce_stop(run, training)
    close_open_window(run, training)
    announce_stop(run, training)
    do_what_is_due_last(run, training)


def fit_epoch(run: Run, training: Training) -> None:
    """One pass over the training data, between its events."""
    state = run.state
    goes_on = run.resumption is not None and run.resumption.enter_epoch()
    reader = open_pass(run, training, goes_on=goes_on)
    windows = iter(reader)
    metrics = run.trainer.metrics
    try:
        try:
            with run.paired(Callback.on_epoch_start, Callback.on_epoch_end, lambda: (dict(metrics),), holds_stop=True):
                fit_pass(run, training, reader, windows, goes_on=goes_on)
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


def fit_pass(run: Run, training: Training, reader: WindowReader, windows: Iterator[Window], *, goes_on: bool) -> None:
    """The windows of a pass, and after each what is due."""
    try:
        window = None if run.state.epoch_ended else first_window(run, training, windows)
        if goes_on:
            go_on_inside(run, training)
            window = None if run.ends_pass else window
        while window is not None:
            fit_window(run, training, window)
            if not served_what_is_due(run, training):
                break
            window = None if run.ends_pass else next(windows, None)
        if run.state.batch == 0 and not run.is_stopping:
            refuse_empty_pass(run, training, reader)
    except EndEpoch:
        cut_epoch(run, training)
    except StopRun as stop:
        run.heed(stop)
        drop_open_window(run, training)


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
                sit_out(run, training)
        agreement.leave(training, flow)
    if window.closes:
        training.opened_at = None
    training.carried = 0 if window.closes else training.carried + len(window.batches)
    run.state.epoch_ended = window.is_last if agreement is None else agreement.close_window()


def fit_batch(run: Run, training: Training, window: Window, position: int) -> None:
    """Forward and backward of one micro-batch, and the optimizer step if it closes its window."""
    events, index = run.events, run.state.batch
    outputs = None
    reader = training.reader
    assert reader is not None
    batch = window.batches[position] if reader.transfer is None else reader.on_device(window, position)
    samples = count_samples(run, training, batch)
    try:
        try:
            if emit := events[Callback.on_batch_start]:
                emit(batch, index)
            if training.splitting is not None:
                outputs = training.splitting.train(run, training, batch, index)
            elif training.is_automatic:
                began = now()
                outputs = training.step(batch, index)
                run.clock.forward += now() - began
                learn_from(run, training, outputs)
            else:
                outputs = manual_step(run, training, batch, index)
        except SkipBatch:
            outputs = None  # a batch without a loss
        closes_window = run.strategy.gradient_state.sync_gradients
        if training.passes == position and not closes_window:
            sit_out(run, training)
        if training.is_automatic and closes_window:
            step_and_count(run, training, batch, samples)
        else:
            count_batch(run, training, batch, samples)
    except BaseException as error:
        hint_at_single_sample(error, samples, index)
        run.fail(error)
        run.finish_despite(error, Callback.on_batch_end, outputs)
        raise
    if emit := events[Callback.on_batch_end]:
        emit(outputs)


def count_samples(run: Run, training: Training, batch: Any) -> int | AmbiguousBatchSizeError | None:
    """The samples of a micro-batch, for its logs and the processes; an error is raised where the number is needed."""
    samples: int | AmbiguousBatchSizeError | None
    try:
        samples = training.count_samples(batch)
    except AmbiguousBatchSizeError as error:
        samples = not_counted(run, error)
    run.training_log.samples = samples
    if run.agreement is not None:
        run.agreement.count(samples, 0 if training.count_tokens is None else training.count_tokens(batch))
    return samples


def learn_from(run: Run, training: Training, outputs: Any) -> None:
    """Backward of the loss that a micro-batch gave, if it gave one."""
    loss = training.loss.take(outputs)
    if loss is None:
        return
    try:
        backward(run, loss)
    except SkipBatch:
        training.loss.leave_out()
        raise


def step_and_count(run: Run, training: Training, batch: Any, samples: object) -> None:
    """The optimizer step in a window's last micro-batch, which counts as done unless it will be trained again."""
    try:
        step(run, training)
    except BaseException as error:
        was_left = run.agreement is not None and run.agreement.was_left
        if training.opened_at is None or (isinstance(error, (EndEpoch, StopRun)) and not was_left):
            count_batch(run, training, batch, samples)
        raise
    count_batch(run, training, batch, samples)


def sit_out(run: Run, training: Training) -> None:
    """A micro-batch without a loss, in a window that goes on: other processes may have one."""
    if training.is_automatic and run.agreement is not None:
        if not training.trained_nothing(run):
            run.strategy.sit_out(run.model)
        training.passes += 1


def count_batch(run: Run, training: Training, batch: Any, samples: object) -> None:
    """Count a micro-batch that is done."""
    state = run.state
    state.batch += 1
    state.micro_step += 1
    if run.agreement is not None:
        run.agreement.is_batch_done = True
        return  # it counts the samples and tokens of all processes
    if type(samples) is int:
        state.samples += samples
    if training.count_tokens is not None:
        state.tokens += training.count_tokens(batch)


def backward(run: Run, loss: Tensor, **kwargs: Any) -> None:
    """Backward with its two events. In a window's last one the processes' vectors travel along."""
    if emit := run.events[Callback.on_before_backward]:
        emit(loss)
    agreement, training = run.agreement, run.training
    began = now()
    if agreement is not None and agreement.is_last_backward:
        agreement.send()
    run.strategy.backward(loss, **kwargs)
    if training is not None:
        training.passes += 1  # also where a callback leaves the window now
    run.clock.backward += now() - began
    if emit := run.events[Callback.on_backward]:
        try:
            emit(loss)
        except SkipBatch as late:
            raise misplaced(late) from late
        except (EndEpoch, StopRun) as flow:
            if agreement is None or not agreement.is_sent:
                raise
            agreement.veto(flow)


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
