"""The plan: what a run will do, worked out before it begins."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from ..callbacks.bus import overridden
from ..callbacks.intervals import Schedule
from ..callbacks.state import RunState
from ..data.loader import PreparedLoader
from ..data.sizes import batch_sizes
from ..data.window import Window
from ..distributed.units import size_bytes
from ..strategies.scheduler import planned_length
from .advice import is_too_short, likely_mistakes
from .data_checks import refuse_empty_pass
from .memory import built_on_meta, plan_memory, read_memory_options
from .modes import attribute_set
from .optimization import SchedulerConfig
from .plan_report import Plan
from .run import Run, Training
from .setup import build_model, overrides, prepare_training, start_run
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer

MOST_BATCHES = 200_000
"""Micro-batches that a plan walks through; of a longer run it tells the beginning."""


def make_plan(
    trainer: Trainer, task: Task, train: Any, val: Any, world_size: int | None, device_memory: int | str | None
) -> Plan:
    """Work out what `trainer.fit(task, train, val)` will do. Nothing is trained, moved or written. Collective once the
    processes have joined each other.

    Args:
        trainer: whose run it is.
        task, train, val: as `fit` takes them.
        world_size, device_memory: as `Trainer.plan` takes them; with one of them the plan tells of memory.
    Raises:
        ConfigError, TaskError, DataError: as `fit` would.
    """
    wanted = read_memory_options(world_size, device_memory)
    notes: list[str] = []
    if any(wanted):
        task, notes = _with_model(task)
    run = start_run(trainer, task, "train")
    with _captured_warnings() as caught, _belonging_to(trainer, task):
        training = prepare_training(run, trainer.settings, train, val)
    plan = Plan(
        num_processes=trainer.process.num_processes,
        batches_per_epoch=training.num_batches,
        callbacks=[(type(c).__name__, list(overridden(c))) for c in run.callbacks],
        notes=[(type(c).__name__, c.plan_note) for c in run.callbacks if c.plan_note is not None],
        weights=_count_weights(task),
        warnings=caught,
    )
    schedules = _schedules(run, training)
    plan.due = {name: [] for name in schedules}
    _note_unplannable(plan, training, schedules)
    if training.num_batches is None:
        _plan_without_length(plan, training)
    else:
        with _rates_put_back(training):
            _walk(plan, run, training, schedules)
    _look_for_mistakes(plan, run, training)
    if any(wanted):
        with _belonging_to(trainer, task):
            plan.memory = plan_memory(run, training, *wanted, takes_batch=not isinstance(train, Iterator))
        plan.memory.notes += notes
    return plan


def _with_model(task: Task) -> tuple[Task, list[str]]:
    """A task whose model is there but takes no memory: a copy, where it builds it late. With what went wrong."""
    if task.__dict__.get("_is_configured", False) or not overrides(task, "configure_model"):
        return task, []

    def build() -> Task:
        late = copy.deepcopy(task)
        build_model(late)
        return late

    late, note = built_on_meta(build, "configure_model")
    return (task, [note]) if late is None else (late, [])


def _plan_without_length(plan: Plan, training: Training) -> None:
    """What can be said where nobody knows when an epoch ends."""
    limit = training.limits.max_steps
    if limit is not None and limit.unit == "steps":
        plan.steps = int(limit.amount)
    plan.is_complete, plan.due, plan.samples = False, {}, None
    plan.warnings.append("the training loader has no length: when epochs end, and what falls due then, is not known.")


def _schedules(run: Run, training: Training) -> dict[str, Schedule]:
    found = {"log": training.log_schedule}
    if training.validation is not None:
        found["validation"] = training.val_schedule
    for callback in run.callbacks:
        if callback.schedule is not None:
            found[type(callback).__name__] = Schedule(callback.schedule, run.state)
    return found


def _walk(plan: Plan, run: Run, training: Training, schedules: Mapping[str, Schedule]) -> None:
    """Go through all windows of the run as the loop does, with counters alone."""
    state = run.state
    sizes = _round_sizes(training)
    plan.samples_per_step = None if sizes is None else sum(sizes[: training.window_size])
    _note_rate(plan, training, 0)
    while training.limits.reached(state) is None and state.micro_step < MOST_BATCHES:
        epoch_began = state.step
        _walk_epoch(plan, run, training, schedules, sizes)
        if not state.epoch_ended:
            break
        plan.steps_per_epoch = plan.steps_per_epoch or state.step - epoch_began
        _step_schedulers(plan, training, training.epoch_schedulers, state.epoch + 1, state.step)
        state.epoch, state.batch, state.epoch_ended = state.epoch + 1, 0, False
    _finish_walk(plan, state, training, schedules)
    plan.samples = None if sizes is None else state.samples


def _walk_epoch(
    plan: Plan, run: Run, training: Training, schedules: Mapping[str, Schedule], sizes: list[int] | None
) -> None:
    state = run.state
    reader = training.windows_of(state.epoch, PreparedLoader(range(training.num_batches or MOST_BATCHES)))
    for window in reader:
        if sizes is not None:
            state.samples += sum(sizes[state.batch : state.batch + len(window.batches)])
        _advance(plan, state, training, window)
        _note_due(plan, state, schedules, is_open=not window.closes)
        if training.limits.reached(state) is not None or state.micro_step >= MOST_BATCHES:
            break
    training.carried = reader.carried
    if state.batch == 0:
        refuse_empty_pass(run, training, reader)


def _note_due(plan: Plan, state: RunState, schedules: Mapping[str, Schedule], *, is_open: bool) -> None:
    for name, schedule in schedules.items():
        if name == "log" and is_open:
            continue  # a window that is left open has no step yet to record
        is_again = name == "validation" and is_open and plan.due[name][-1:] == [state.step]
        if schedule.is_due(state) and not is_again:
            plan.due[name].append(state.step)


def _finish_walk(plan: Plan, state: RunState, training: Training, schedules: Mapping[str, Schedule]) -> None:
    reached = training.limits.reached(state)
    if reached and training.carried:  # a window that is still open is stepped on at the end
        state.step += 1
        _step_schedulers(plan, training, training.step_schedulers, state.step, state.step)
    plan.is_complete = plan.is_complete and reached is not None
    plan.end = str(reached) if reached else ""
    plan.steps, plan.batches, plan.epochs = state.step, state.micro_step, state.epochs_done
    for name, schedule in schedules.items():
        ends = schedule.is_due_at_end or (name == "log" and schedule.is_ever_due)
        if ends and state.step not in plan.due[name][-1:]:
            plan.due[name].append(state.step)


def _advance(plan: Plan, state: RunState, training: Training, window: Window) -> None:
    state.batch += len(window.batches)
    state.micro_step += len(window.batches)
    state.epoch_ended = window.is_last
    if window.closes:
        state.step += 1
        _step_schedulers(plan, training, training.step_schedulers, state.step, state.step)


def _step_schedulers(plan: Plan, training: Training, rates: Iterable[SchedulerConfig], count: int, step: int) -> None:
    changed = False
    for rate in rates:
        if step and rate.is_point(count) and not rate.needs_metric and training.is_automatic:
            _step_alone(rate.scheduler)
            changed = True
    if changed:
        _note_rate(plan, training, step)


def _step_alone(scheduler: Any) -> None:
    if getattr(scheduler, "total_steps", None) == getattr(scheduler, "last_epoch", -1):
        return  # it has a hard end
    with warnings.catch_warnings():  # torch warns of a schedule that moves while its optimizer does not
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        scheduler.step()


def _note_rate(plan: Plan, training: Training, step: int) -> None:
    if training.optimizers:
        rate = float(training.optimizers[0].param_groups[0]["lr"])
        if not plan.learning_rates or plan.learning_rates[-1][1] != rate:
            plan.learning_rates.append((step, rate))


def _round_sizes(training: Training) -> list[int] | None:
    """The samples of all processes in each batch of an epoch, None where the loader does not tell them."""
    loader = training.loader
    sizes = batch_sizes(loader.loader) if loader.dealer is None else loader.dealer.round_sizes()
    return None if sizes is None else sizes[: training.num_batches]


def _count_weights(task: Task) -> dict[str, int]:
    held = task.state_dict(keep_vars=True).values()
    shaped = [tensor for tensor in held if not is_lazy(tensor)]  # others are lazy layers'
    unique = {tensor.data_ptr() or id(tensor): tensor for tensor in shaped}.values()
    return {
        "tensors": len(unique),
        "elements": sum(t.numel() for t in unique),
        "bytes": size_bytes(unique),
    }


# What looks wrong.


def _note_unplannable(plan: Plan, training: Training, schedules: Mapping[str, Schedule]) -> None:
    unknown = {"seconds", "tokens"} | (set() if _round_sizes(training) else {"samples"})
    for duration in training.limits.durations:
        if duration.unit in unknown:
            plan.is_complete = False
            plan.warnings.append(f"the run may end after {duration}, which can't be foreseen in steps.")
    for name, schedule in schedules.items():
        for duration in schedule.interval.every:
            if duration.unit in unknown:
                plan.warnings.append(f"{name} falls due every {duration}, which this plan does not show in steps.")


def _look_for_mistakes(plan: Plan, run: Run, training: Training) -> None:
    plan.warnings += likely_mistakes(run, training)
    _look_for_cut_windows(plan, training)
    for rate in training.schedulers:
        planned = planned_length(rate.scheduler)
        steps = plan.steps if rate.interval == "step" else int(plan.epochs)
        if is_too_short(rate, steps):
            plan.warnings.append(
                f"{type(rate.scheduler).__name__} ends after {planned} steps of its own, but the run gives it "
                f"{steps // rate.frequency}: fit refuses it."
            )
        elif planned is not None and plan.is_complete and planned > steps // rate.frequency:
            plan.warnings.append(
                f"{type(rate.scheduler).__name__} is planned for {planned} steps of its own, but the run gives it "
                f"{steps // rate.frequency}: the learning rate does not reach its end."
            )
    if training.validation is not None and plan.is_complete and not plan.due.get("validation"):
        plan.warnings.append(f"validation never falls due: val_every='{training.val_schedule.interval}'.")


def _look_for_cut_windows(plan: Plan, training: Training) -> None:
    if training.num_batches is None or training.window_size == 1:
        return
    rest = training.num_batches % training.window_size
    if rest:
        what = {
            "flush": f"the last step of each epoch averages over {rest}",
            "carry": "windows go on over the ends of epochs",
            "drop": f"the last {rest} batches of each epoch are left out",
        }[training.remainder]
        plan.warnings.append(
            f"{training.num_batches} batches per epoch are no multiple of accumulate={training.window_size}: {what}."
        )


def _belonging_to(trainer: Trainer, task: Task) -> AbstractContextManager[None]:
    """A context in which the task's hooks see the trainer as in `fit`."""
    return attribute_set(task, "_trainer", trainer)


@contextmanager
def _rates_put_back(training: Training) -> Iterator[None]:
    """A context after which the schedules and the settings of the optimizers are as before: the task may keep them."""
    schedules = [(rate.scheduler, copy.deepcopy(rate.scheduler.state_dict())) for rate in training.schedulers]
    groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    try:
        yield
    finally:
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        for scheduler, state in schedules:
            scheduler.load_state_dict(state)


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.extend(str(w.message) for w in caught)
