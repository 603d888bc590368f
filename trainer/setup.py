"""Composition: from settings, a task and its data to a `Run`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..callbacks.bus import bind
from ..callbacks.callback import SkipBatch
from ..callbacks.event_timer import EventTimer
from ..callbacks.intervals import Interval, Schedule
from ..callbacks.state import RunState
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..distributed.errors import ConfigError, DataError, TaskError
from ..distributed.random import set_seed
from ..strategies.compiling import Compiling, compile_parts
from ..strategies.recompiling import Recompilations
from .auto_accumulate import Splitting
from .evaluation import Stage
from .loaders import batches_allowed, evaluation_data, first_batches, training_loader
from .metrics import MetricLog
from .optimization import Optimization, configure
from .optimizer_step import announce_step
from .overhead import OverheadBudget
from .run import EvaluationData, Run, Training
from .settings import Settings
from .signature import bind_step, checked_count, sample_counter
from .splitting_together import SplittingTogether
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer


def check_task(task: object) -> Task:
    """The task, if it is one.

    Raises:
        TaskError: it is something else.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        raise TaskError(f"task={task.__name__} is a class. Pass an object: {task.__name__}(...).")
    raise TaskError(
        f"task is a {type(task).__name__}. Expected a loopwright.Task; wrap the module in one that has training_step "
        "and configure_optimizers."
    )


def kind_of(task: Task) -> str:
    """The word for runs of such a task, in the names of their folders."""
    return type(task).__name__.lower()


def overrides(task: Task, method: str) -> bool:
    """Whether a task has its own version of a method."""
    return getattr(type(task), method) is not getattr(Task, method) or method in vars(task)


def start_run(trainer: Trainer, task: Task, stage: str) -> Run:
    """A run that has its callbacks, trackers and counters; nothing is placed and no event has fired."""
    log = MetricLog(stage, trainer.progress_metrics)
    run = Run(
        trainer=trainer, task=task, model=task, events={}, state=RunState(stage=stage), strategy=trainer.strategy,
        trackers=trainer.tracker_group, training_log=log, log=log,
    )  # fmt: skip
    share = trainer.settings.overhead_budget
    run.budget = None if share is None or stage != "train" else OverheadBudget(share)
    rebind(run)
    return run


def rebind(run: Run) -> None:
    """Bind the events to whoever handles them now: the task, the callbacks, then single functions."""
    functions = [(f.event, f) for f in run.trainer.functions]
    counts = any(isinstance(each, EventTimer) and each.counts_synchronizations for each in run.callbacks)
    counter = run.synchronizations if counts else None
    run.events.update(bind(run.callbacks, functions, run.trainer, run.task, run.clock.ledger, counter))


def place(run: Run, training: Training) -> None:
    """Put the task with its optimizers where it computes, and make the optimizers known to the accelerator."""
    method = "training_step" if training.is_automatic else None
    run.precision.prepare_model(run.task)
    run.model, training.optimizers = run.strategy.setup(run.task, training.optimizers, method)
    if method is not None:
        training.step = bind_step(
            run.task.training_step, run.precision, run.strategy.training_method(run.model, method)
        )
    if run.agreement is not None:
        run.agreement.begin_fit(is_manual=not training.is_automatic)
        # The weights are equal by now; dropout and augmentation are to differ.
        set_seed((run.agreement.seed + run.strategy.data_share.process_index) % 2**32)
    preparation = run.trainer.accelerator.preparation
    preparation.optimizers.clear()
    training.gated = [preparation.optimizer(optimizer) for optimizer in training.optimizers]
    for gated in training.gated:
        gated.before_step = partial(_is_applied, run)


def build_model(task: Task, compiling: Compiling | None = None) -> None:
    """Let the task build what it left for later, once, and compile what is to be compiled.

    Raises:
        ConfigError: there is nothing that could be compiled so.
    """
    if not task.__dict__.get("_is_configured", False):
        task.configure_model()
        task.__dict__["_is_configured"] = True
    if compiling is not None:
        compile_parts(task, compiling)


def watch_compiler(run: Run, compiling: Compiling | None) -> None:
    """Count what is compiled anew, until the run ends."""
    if compiling is not None:
        run.recompilations = Recompilations([run.task])
        run.recompilations.start()


def prepare_training(run: Run, settings: Settings, train: Any, val: Any) -> Training:
    """Everything that `fit` needs, checked before anything runs. Nothing is placed yet: see `place`.

    Raises:
        ConfigError: settings that contradict each other or the task.
        TaskError: a hook is missing or returns what can't be used.
        DataError: the data can't be used.
    """
    task = run.task
    check_limits(settings)
    loader, validation = _read_data(run, settings, train, val)
    limit = batches_allowed(settings.batch_limits.get("train"), loader.loader, "train")
    num_batches = _epoch_length(loader, limit)
    _check_epoch(settings, num_batches, validation)
    check_hooks(task, settings, validation)
    if settings.splits_batches:
        run.strategy.check_splitting()
    with run.strategy.building():
        build_model(task, settings.compiling)
    watch_compiler(run, settings.compiling)
    with run.strategy.whole_shapes(task):
        found = configure(task)
    run.state.batches_per_epoch = num_batches
    return _training(run, settings, loader, limit, num_batches, validation, found)


def _is_applied(run: Run, optimizer: Optimizer) -> bool:
    """Fire `on_before_step` in manual optimization. Returns whether the step is to be applied, on all processes.

    Collective where a callback may drop it.
    """
    try:
        announce_step(run, optimizer)
    except SkipBatch:
        return False
    return True


def _splitting(run: Run) -> Splitting:
    return SplittingTogether() if run.strategy.splits_together else Splitting()


def _training(
    run: Run, settings: Settings, loader: PreparedLoader, limit: int | None, num_batches: int | None,
    validation: EvaluationData | None, found: Optimization,
) -> Training:  # fmt: skip
    task, state = run.task, run.state
    intervals = (settings.val_interval, settings.log_interval)
    return Training(
        loader=loader,
        num_batches=num_batches,
        batch_limit=limit,
        window_size=settings.accumulate,
        remainder=settings.remainder,
        is_automatic=task.automatic_optimization,
        splitting=_splitting(run) if settings.splits_batches else None,
        optimizers=found.optimizers,
        schedulers=found.schedulers,
        limits=settings.limits,
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        log_schedule=Schedule(settings.log_interval, state),
        val_schedule=Schedule(settings.val_interval if validation else Interval(), state),
        validation=validation,
        sanity_batches=settings.sanity_val_batches,
        step=bind_step(task.training_step, run.precision),
        count_samples=sample_counter(task),
        count_tokens=checked_count(task.count_tokens) if overrides(task, "count_tokens") else None,
        needs_tokens=any(d.unit == "tokens" for i in intervals for d in i.every)
        or any(d.unit == "tokens" for d in settings.limits.durations),
    )


def _read_data(run: Run, settings: Settings, train: Any, val: Any) -> tuple[PreparedLoader, EvaluationData | None]:
    task = run.task
    loader = training_loader(task.train_dataloader() if train is None else train)
    val = task.val_dataloader() if val is None else val
    if settings.overfit_batches is not None:
        loader = first_batches(loader, settings.overfit_batches)
        val = None if val is None else loader
    configuration = _seeding(run.trainer.accelerator.dataloader_config)
    prepared = run.strategy.setup_dataloader(loader, configuration)
    limit = settings.batch_limits.get("val")
    if val is None or limit == 0 or settings.val_interval.is_never:
        return prepared, None
    return prepared, evaluation_data(val, "val", limit, run.strategy, configuration)


def _seeding(configuration: DataLoaderConfiguration) -> DataLoaderConfiguration:
    """With the data's own random stream, unless it was decided otherwise."""
    return configuration if configuration.seed_batches is not None else replace(configuration, seed_batches=True)


def _epoch_length(loader: PreparedLoader, limit: int | None) -> int | None:
    """Micro-batches in an epoch.

    Raises:
        DataError: there are none.
    """
    length = loader.length
    if limit == 0:
        raise DataError("limit_batches leaves no training batch. Give at least one, or a larger fraction.")
    if length is None:
        return None
    return length if limit is None else min(length, limit)


def _check_epoch(settings: Settings, num_batches: int | None, validation: EvaluationData | None) -> None:
    """Refuse what needs the length of an epoch where there is none, and warn of windows that never fill."""
    fractions = {"log_every": settings.log_interval} | ({"val_every": settings.val_interval} if validation else {})
    for option, interval in fractions.items():
        if num_batches is None and interval.needs_epoch_length:
            raise DataError(
                f"{option}='{interval}' is a fraction of an epoch, but the training loader has no length. Count in "
                "steps, samples or time, or give the loader a __len__."
            )
    limit = settings.limits.max_epochs
    if num_batches is None and limit is not None and not limit.is_whole:
        raise DataError(f"max_epochs={limit.amount:g} ends inside an epoch, but the training loader has no length.")
    if num_batches is not None and num_batches < settings.accumulate and settings.remainder == "flush":
        warnings.warn(
            f"accumulate={settings.accumulate} but an epoch has {num_batches} batches: each step averages over "
            f"{num_batches}. Use accumulate_across_epochs='carry' for windows that go on over epochs.",
            stacklevel=2,
        )


def check_limits(settings: Settings) -> None:
    """A run needs an end.

    Raises:
        ConfigError: it has none.
    """
    if not settings.limits.durations:
        raise ConfigError(
            "fit has no end: none of max_epochs, max_steps, max_time and fast_dev_run is given. Give one."
        )


def check_hooks(task: Task, settings: Settings, validation: EvaluationData | None) -> None:
    """What the run will call must be there, and fit the kind of optimization.

    Raises:
        TaskError: a hook is missing.
        ConfigError: a setting that manual optimization can't serve.
    """
    for hook in ("training_step", "configure_optimizers"):
        if not overrides(task, hook):
            raise TaskError(f"{type(task).__name__} has no {hook}, which trainer.fit needs. Override it in the task.")
    if validation is not None and not overrides(task, "validation_step"):
        raise TaskError(
            f"there is validation data, but {type(task).__name__} has no validation_step. Override it, or pass no val=."
        )
    if not task.automatic_optimization:
        if settings.splits_batches:
            raise ConfigError(
                "auto_accumulate=True has no effect in manual optimization: where training_step steps its optimizers "
                "itself, it can't be done again. Use smaller batches, or find_executable_batch_size."
            )
        given: Mapping[str, Any] = {
            "accumulate": settings.accumulate if settings.accumulate > 1 else None,
            "clip_norm": settings.clip_norm,
            "clip_value": settings.clip_value,
        }
        for option, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{option}={value} has no effect in manual optimization. Do it in training_step: step every so "
                    "many batches, or call self.trainer.accelerator.clip_grad_norm_(...)."
                )


def prepare_evaluation(run: Run, settings: Settings, stage: Stage, data: Any) -> EvaluationData:
    """What `validate`, `test` and `predict` need, checked before anything runs.

    Raises:
        TaskError: the stage's step is missing.
        DataError: the data can't be used.
    """
    task = run.task
    short = {"validation": "val"}.get(stage.name, stage.name)
    answers = overrides(task, stage.step) or (stage.name == "predict" and type(task).forward is not Task.forward)
    if not answers:
        raise TaskError(
            f"{type(task).__name__} has no {stage.step}, which {stage.name} needs. Override it in the task."
        )
    if data is None:
        data = getattr(task, f"{short}_dataloader")()
    if data is None:
        raise DataError(f"there is no {stage.name} data. Pass it, or give the task a {short}_dataloader().")
    configuration = _seeding(run.trainer.accelerator.dataloader_config)
    found = evaluation_data(data, stage.name, settings.batch_limits.get(short), run.strategy, configuration)
    build_model(task, settings.compiling)
    watch_compiler(run, settings.compiling)
    run.precision.prepare_model(task)
    run.model, _ = run.strategy.setup(task, [], None)
    return found
