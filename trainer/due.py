"""What comes due at a step boundary: a record, a validation, a limit, a checkpoint."""

from __future__ import annotations

import warnings

from ..callbacks.callback import StopRun
from .evaluation import validate
from .run import Run, Training
from .saves import save_what_was_asked


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


def record_step(run: Run, training: Training) -> None:
    """Make a record of the newest window. Where an exception prevents it, a run that goes on makes up for it."""
    before, training.logged_at = training.logged_at, run.state.micro_step
    try:
        with run.steered():
            run.record(run.training_log.step_values(), is_of_step=True)
    except Exception as error:
        if not isinstance(error, StopRun):
            training.logged_at = before
        raise


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
