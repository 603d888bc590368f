"""`Trainer`: runs a task."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun
from ..callbacks.functional import FilteredFunction, find_event
from ..callbacks.intervals import Interval
from ..callbacks.limits import Limits
from ..callbacks.order import sort_callbacks
from ..callbacks.state import RunState
from ..checkpoint.reading import Checkpoint
from ..data.configuration import DataLoaderConfiguration
from ..data.window import Remainder
from ..distributed import watch
from ..distributed.environment import read_flag
from ..distributed.errors import ConfigError, check_boolean, suggest
from ..distributed.group import is_connected
from ..distributed.launched import Launch, find_launch
from ..distributed.process import ProcessState
from ..distributed.random import set_seed
from ..strategies.compiling import read_compiling
from ..strategies.dynamo_plugin import CompileSettings
from ..strategies.fp8_recipes import RecipeKwargs
from ..strategies.precision import Precision
from ..strategies.strategy import Strategy
from ..trackers.registry import create_trackers
from ..trackers.tracker import RunInfo, Status, Tracker
from . import loop
from .accelerator import Accelerator
from .advice import check_schedules, unheard_events
from .directories import RunDirectories, checkpoint_folders
from .evaluation import PREDICT, TEST, VALIDATION, Stage, evaluate, predict
from .keywords import naming_keywords
from .loaders import read_batch_limits
from .meeting import join_others
from .modes import deterministic_algorithms, float32_products, training_mode
from .overhead import read_overhead_budget
from .plan import make_plan
from .plan_report import Plan
from .resume import LATEST, find_checkpoint, go_on_from, read_resume_from, restore, tell
from .run import Run, refused
from .saves import waiting_for_saves
from .saving import RunSaving
from .settings import Settings, read_fast_dev_run
from .setup import check_task, kind_of, place, prepare_evaluation, prepare_training, rebind, start_run
from .signals import ending_on_signals
from .task import Task
from .world import read_timeout, read_world, warn_of_timeout

if TYPE_CHECKING:
    from ..distributed.peers import Peers


class Trainer(RunSaving):
    """Runs a task: trains, validates, tests and predicts with it.

    Args:
        max_epochs: epochs to train; a fraction ends inside an epoch.
        max_steps: applied optimizer steps to train, or another unit: `"1M tokens"`, `"50000 samples"`.
        max_time: wall-clock time to train: `"30 min"`, seconds, or a timedelta. The first limit that is reached ends
            the run; one of the three is needed, or `fast_dev_run`.
        strategy: how a step is carried out: a word (`"auto"`, `"single"`, `"ddp"`, `"fsdp"`, `"deepspeed"`), a mapping
            with `"name"` and options, or an object.
        devices: how many devices of each machine to use. `"auto"`: those that a launcher started processes for; without
            a launcher one, or all of this machine with a strategy for several. A script that no launcher has started
            runs itself again for each further device.
        num_nodes: how many machines take part; more than one need a launcher.
        process_timeout: how long processes wait for one that does not come before the run fails: `"10 min"`, seconds,
            or a timedelta; by default as long as torch has it, 30 minutes, 10 with NCCL.
        precision: `"no"`, `"bf16"` or `"fp16"` (forward and backward under autocast), `"fp8"` (also linear layers in
            8 bits), `"bf16-true"` or `"fp16-true"` (weights too); a mapping with `"name"` and options; or a recipe of
            fp8.
        matmul_precision: of products of fp32 numbers while a run goes on, `"highest"`, `"high"` or `"medium"`, as
            `torch.set_float32_matmul_precision` takes it; None: as torch is set.
        compile: compile the task's modules by `torch.compile`; keys of the state stay as they are. `"regional"`: the
            layers that it repeats alone, whose code is compiled once for all of them. A mapping: `"regional"` and
            arguments of `torch.compile`; or Accelerate's `TorchDynamoPlugin`.
        accumulate: micro-batches per optimizer step.
        auto_accumulate: where memory runs out in a forward or backward pass, train batches in parts, as many as it
            takes, with the same result. `part_size` tells how large they are.
        accumulate_across_epochs: what becomes of a window that an epoch's end cuts: `"flush"` steps on it, with its
            exact mean; `"carry"` goes on with it in the next epoch; `"drop"` leaves its batches out.
        clip_norm: the largest global norm that gradients keep.
        clip_value: the largest magnitude that an element of a gradient keeps.
        dataloader_config: how training loaders are prepared and shared among processes. Of an evaluation's loaders it
            sets `use_seedable_sampler`, `data_seed` and `non_blocking`; their batches are always dealt so that each
            sample counts once.
        val_every: when to validate; a bare number counts optimizer steps. None or `"never"`: never.
        sanity_val_batches: validation batches tried before training.
        limit_batches: batches per pass: a number, a fraction, or these by stage (`"train"`, `"val"`, `"test"`,
            `"predict"`).
        overfit_batches: train on the same first batches in every epoch, and validate on them.
        fast_dev_run: try everything with one batch (or so many) of each stage; no tracker, no file.
        callbacks: they run in the order that they declare, and else as given.
        trackers: where metrics go: a word, an object, a mapping with `"name"` and options, or a list of these; False
            for none.
        progress: show a progress bar.
        log_every: when values of steps become a record; a bare number counts optimizer steps.
        overhead_budget: the share of the training's time, such as `"2%"`, above which trackers are given fewer records
            of steps, and callbacks are warned of.
        seed: seeds Python, NumPy and torch, here and again when a run begins.
        deterministic: use deterministic algorithms while a run goes on, or fail where torch has none.
        project_dir: the folder of all runs.
        name: the run's name and folder below `project_dir`; by default the task's name and the time.
    Raises:
        ConfigError: an argument can't be used; says what is accepted.
        TypeError: an argument is unknown; names the one that is meant.
    """

    @naming_keywords
    def __init__(
        self,
        *,
        max_epochs: int | float | str | None = None,
        max_steps: int | str | None = None,
        max_time: str | float | datetime.timedelta | None = None,
        strategy: str | Strategy | dict[str, Any] = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        process_timeout: float | str | datetime.timedelta | None = None,
        precision: str | dict[str, Any] | RecipeKwargs | Precision = "no",
        matmul_precision: str | None = None,
        compile: bool | str | dict[str, Any] | CompileSettings = False,
        accumulate: int = 1,
        auto_accumulate: bool = False,
        accumulate_across_epochs: Remainder = "flush",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        val_every: int | str | list[int | str] | None = "1 epoch",
        sanity_val_batches: int = 2,
        limit_batches: int | float | dict[str, int | float] | None = None,
        overfit_batches: int | None = None,
        fast_dev_run: bool | int = False,
        callbacks: Callback | Sequence[Callback] | None = (),
        trackers: str | bool | Tracker | dict[str, Any] | list[str | Tracker | dict[str, Any]] | None = "tensorboard",
        progress: bool = True,
        log_every: int | str | list[int | str] = "50 steps",
        overhead_budget: float | str | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        project_dir: str | Path = "runs",
        name: str | None = None,
    ) -> None:
        self.config: dict[str, Any] = {
            key: value for key, value in locals().items() if key not in ("self", "callbacks", "trackers", "__class__")
        }
        """The arguments, as trackers are told of them; the command line adds the rest of its file."""
        world = read_world(devices, num_nodes, strategy)
        self._timeout = read_timeout(process_timeout)
        settings = Settings(
            limits=Limits.parse(max_epochs, max_steps, max_time),
            accumulate=accumulate,
            remainder=accumulate_across_epochs,
            splits_batches=auto_accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            val_interval=Interval.parse(val_every, unit="steps", option="val_every"),
            log_interval=Interval.parse(log_every, unit="steps", option="log_every"),
            overhead_budget=read_overhead_budget(overhead_budget),
            sanity_val_batches=sanity_val_batches,
            batch_limits=read_batch_limits(limit_batches),
            overfit_batches=overfit_batches,
            compiling=read_compiling(compile),
            seed=seed,
            is_deterministic=deterministic,
            matmul_precision=matmul_precision,
            project_dir=Path(project_dir) if isinstance(project_dir, (str, os.PathLike)) else project_dir,
            name=name,
        )
        num_tried = read_fast_dev_run(fast_dev_run)
        self.settings = settings.for_dev_run(num_tried) if num_tried else settings
        if seed is not None:
            set_seed(seed)  # so that a task which is built after the Trainer has the same weights each time
        cpu = bool(read_flag("USE_CPU"))
        self.accelerator = Accelerator(
            mixed_precision=precision,
            dynamo_backend="no",  # what is to be compiled is compiled in place, before it is placed
            gradient_accumulation_steps=accumulate,
            dataloader_config=dataloader_config,
            strategy=strategy,
            process=ProcessState(cpu, place=world, timeout=self._timeout, connects=False),
        )
        check_boolean("progress", progress)
        self._callbacks = sort_callbacks(_with_progress(callbacks, progress))
        self.functions: list[FilteredFunction] = []
        """What `on` registered."""
        is_silent = self.settings.is_fast_dev_run or not self.process.is_main_process
        self.tracker_group = create_trackers(trackers, enabled=not is_silent)
        self.metrics: dict[str, float] = {}
        """The newest value of each metric, as plain numbers."""
        self.progress_metrics: dict[str, Any] = {}
        """The newest values that were logged with `progress_bar=True`, on their devices: reading one may wait."""
        self.state = RunState()
        self._run: Run | None = None
        self._newest_run: Run | None = None
        self._newest_fit: Run | None = None
        self._run_directory: Path | None = None
        self._peers: Peers | None = None
        """The other processes, where this one has started them."""
        self._directories = RunDirectories(self.settings.project_dir, self.settings.name)
        self._info: RunInfo | None = None

    # Running a task.

    def fit(self, task: Task, train: Any = None, val: Any = None, *, resume_from: str | Path | None = None) -> None:
        """Train a task. Each call is a run of its own: counters begin at 0, the task's weights go on.

        From a checkpoint the earlier run goes on as if it had never stopped, in its folder and with its trackers,
        unless this Trainer has another name. What its last leg recorded behind the checkpoint is taken back.

        Args:
            task: what to train.
            train: any iterable of batches; or a mapping or list of loaders, read as one; by default the task's
                `train_dataloader()`.
            val: the same for validation, where several loaders are validated one after another.
            resume_from: `"latest"`: the newest whole checkpoint of this run, or a new beginning where there is none;
                `"best"`: the best one; or the path of a checkpoint. Words look where callbacks keep checkpoints, and in
                `checkpoints` in the run's folder; without a `name`, of the newest run of this task. None: a new run;
                but in processes that `loopwright launch --max_restarts` has started again, the first `fit` goes on with
                theirs.
        Raises:
            ConfigError, TaskError, DataError: before anything runs, when something is missing or contradicts itself.
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        with ExitStack() as stack:
            run = self._start(stack, task, "train", resume_from)
            stack.enter_context(waiting_for_saves(run))
            training = run.training = prepare_training(run, self.settings, train, val)
            check_schedules(training)
            place(run, training)
            if run.resumption is not None:
                restore(run, training, run.resumption)
                tell(run, run.resumption)
            for text in unheard_events(run):
                warnings.warn(text, stacklevel=2)
            self._open_trackers(run)
            stack.enter_context(training_mode(run.task))
            stack.enter_context(torch.enable_grad())  # what the task does to this mode ends with the run
            with run.clock.running():
                loop.fit(run, training)
            if run.budget is not None:
                run.budget.report(run.clock)

    def validate(self, task: Task, data: Any = None) -> dict[str, float]:
        """Evaluate a task by its `validation_step`. Returns the means of what it logged, by name."""
        return self._evaluate(task, VALIDATION, data)

    def test(self, task: Task, data: Any = None) -> dict[str, float]:
        """Evaluate a task by its `test_step`. Returns the means of what it logged, by name."""
        return self._evaluate(task, TEST, data)

    def predict(
        self, task: Task, data: Any = None, *, writer: Callable[[Any, Any, int], None] | None = None
    ) -> list[Any]:
        """The outputs of the task's `predict_step`, one per batch in the order of the data.

        Args:
            task: what predicts.
            data: any iterable of batches; by default the task's `predict_dataloader()`.
            writer: is given each batch's outputs, the batch and its index; nothing is kept in memory then, and the
                returned list is empty.
        """
        with ExitStack() as stack:
            run = self._start(stack, task, "predict")
            found = prepare_evaluation(run, self.settings, PREDICT, data)
            self._open_trackers(run)
            return predict(run, found, writer)

    def plan(
        self,
        task: Task,
        train: Any = None,
        val: Any = None,
        *,
        world_size: int | None = None,
        device_memory: int | str | None = None,
    ) -> Plan:
        """What `fit` with these arguments will do, without doing it: `print(trainer.plan(task, train, val))`.

        With one of the last two it also says what each strategy would hold in memory, and which is the simplest that
        fits; the model may be on the meta device then. With several processes each makes the same plan. Collective
        once they have joined each other, as in `fit`.

        Args:
            task: what would be trained.
            train: as `fit` takes it.
            val: as `fit` takes it.
            world_size: the processes that share the memory; by default those of this Trainer.
            device_memory: what one device has: bytes, or text such as `"80GB"`.
        Raises:
            ConfigError, TaskError, DataError: as `fit` would.
        """
        return make_plan(self, check_task(task), train, val, world_size, device_memory)

    def _evaluate(self, task: Task, stage: Stage, data: Any) -> dict[str, float]:
        with ExitStack() as stack:
            run = self._start(stack, task, stage.name)
            found = prepare_evaluation(run, self.settings, stage, data)
            self._open_trackers(run)
            return evaluate(run, stage, found)

    def _start(self, stack: ExitStack, task: Task, stage: str, resume_from: object = None) -> Run:
        """A run after `on_setup`. The stack fires `on_teardown` and puts everything back."""
        check_task(task)
        if self._run is not None:
            raise ConfigError(
                f"this Trainer is running {self._run.state.stage} of {type(self._run.task).__name__} already. "
                "Use another Trainer inside it."
            )
        wanted = read_resume_from(self._next_resume if resume_from is None else resume_from)
        self._next_resume = None
        self._connect()
        if self.settings.seed is not None:
            set_seed(self.settings.seed)
        run = self._begin(task, stage, wanted)
        if stage == "train":
            stack.enter_context(ending_on_signals(run))  # around all of it, so that what ends the run is not cut off
        stack.callback(self._finish, run)
        if self.process.num_processes > 1:
            self._meet(run)
        stack.enter_context(deterministic_algorithms(self.settings.is_deterministic))
        stack.enter_context(float32_products(self.settings.matmul_precision))
        stack.enter_context(refused(SkipBatch, EndEpoch, StopRun))  # out of on_setup and on_teardown
        stack.enter_context(run.paired(Callback.on_setup, Callback.on_teardown))
        stack.enter_context(refused(SkipBatch, EndEpoch, StopRun))
        return run

    def _connect(self) -> None:
        """Join the other processes of the run, after starting them if nobody has. Collective."""
        process = self.process
        if process.num_processes == 1:
            return
        if is_connected():
            warn_of_timeout(self._timeout)
            return
        if process.place.launcher != "none":
            process.connect()
            return
        from ..distributed.peers import start_peers  # here: only a script that starts itself needs it

        self._peers = start_peers(process.num_processes)
        process.connect(self._peers.init_method)

    def _meet(self, run: Run) -> None:
        """Let the processes of a run agree on its folder, and begin to decide together. Collective."""
        facts = join_others(run, {"directory": str(self.run_directory), "id": run.saves.run_id})
        self._run_directory, run.saves.run_id = Path(facts[0]["directory"]), facts[0]["id"]

    def _open_trackers(self, run: Run) -> None:
        """Once all is prepared: a run that can't begin leaves nothing behind."""
        info = self._run_info()
        if run.resumption is not None:
            info = replace(info, resumed_step=run.resumption.step)
        elif run.begins_again:
            info = replace(info, resumed_step=-1)  # an earlier leg was killed before its first checkpoint
        run.trackers.start(info, self._tracker_config(run.task))

    def _find(self, task: Task, wanted: str | Path | Launch) -> Checkpoint | None:
        """The checkpoint to go on from. Collective."""
        own = (callback.checkpoint_folder for callback in self._callbacks)
        folders = checkpoint_folders(own, self._directories.earlier(kind_of(task)))
        return find_checkpoint(wanted, folders, self.process)

    def _begin(self, task: Task, stage: str, wanted: str | Path | None) -> Run:
        is_first = stage == "train" and self._newest_fit is None
        launch = find_launch() if wanted is None and is_first else None
        source = launch if launch is not None and launch.num_restarts else wanted
        checkpoint = None if source is None else self._find(task, source)
        run = start_run(self, task, stage)
        for function in self.functions:
            function.reset(run.state)
        if stage == "train":
            self.metrics.clear()
            if checkpoint is None:
                self._run_directory = self._directories.new(kind_of(task))
                run.begins_again = wanted == LATEST
            else:
                run.resumption = go_on_from(run, checkpoint, self._directories)
                self._run_directory = self._directories.of(checkpoint.manifest.run["name"])
        elif self._newest_fit is not None:
            run.state.adopt(self._newest_fit.state)  # an evaluation after training belongs to its last step
        self.progress_metrics.clear()
        self.state = run.state
        self._run = self._newest_run = run
        run.outer_trainer = task.__dict__.get("_trainer")
        task.__dict__["_trainer"] = self
        return run

    def _finish(self, run: Run) -> None:
        if run.training is not None:
            self._newest_fit = run
            for optimizer in run.training.optimizers:
                run.precision.forget(optimizer)  # what an exception left unscaled in the middle of a step
        status: Status = "success" if run.signal is None else "interrupted"
        if run.error is not None:
            status = "interrupted" if isinstance(run.error, KeyboardInterrupt) else "failed"
        try:
            run.trackers.finish(status)
        finally:
            run.task.__dict__.pop("_trainer", None)
            if run.outer_trainer is not None:
                run.task.__dict__["_trainer"] = run.outer_trainer
            run.strategy.teardown()
            run.state.pause()
            run.state.stage = "idle"
            run.gradient_state.sync_gradients = True
            run.release()
            self._run = None
        if run.error is not None and run.agreement is not None:
            if self._peers is not None:
                self._peers.notice(run.error)
            watch.leave_group_after(run.error)

    # Steering a run.

    def stop(self, reason: str) -> None:
        """Ask the run for an orderly end at the next step boundary."""
        if self._run is not None:
            self._run.stop(reason)

    def on(self, event: str, function: Callable[..., Any] | None = None, **filters: Any) -> Any:
        """Call a function at an event: `trainer.on("step", report, every=100)`, or as a decorator.

        Args:
            event: its name, with or without `on_`.
            function: called with the trainer, the task and the event's values.
            filters: `every`, `once`, `before`, `after`, `when` and `steers`, as `FilteredFunction` describes them.
        Returns:
            The function; without one, a decorator.
        Raises:
            ConfigError: there is no such event or filter.
        """
        if function is None:
            return lambda decorated: self.on(event, decorated, **filters)
        known = ("every", "once", "before", "after", "when", "steers")
        for name in filters:
            if name not in known:
                raise ConfigError(f"trainer.on(..., {name}=) is unknown. {suggest(name, known)}")
        handler = FilteredFunction(find_event(event), function, **filters)
        self.functions.append(handler)
        if self._run is not None:
            handler.reset(self._run.state)
            rebind(self._run)
        return function

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Record a metric from a callback; as `Task.log`."""
        self._active("log").log.log(name, value, **options)

    def manual_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward in manual optimization; as `Task.manual_backward`."""
        run = self._active("manual_backward")
        with torch.autocast(run.device.type, enabled=False) if run.precision.autocasts else nullcontext():
            loop.backward(run, loss, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the run's forward passes are."""
        return self.accelerator.precision.autocast()

    @property
    def callbacks(self) -> Sequence[Callback]:
        """All callbacks in the order in which they run."""
        return tuple(self._callbacks)

    @property
    def run_directory(self) -> Path:
        """Where the run's files go; who writes there creates it. Before the first `fit`, where an evaluation's go."""
        if self._run_directory is None:
            self._run_directory = self._directories.new("run" if self._run is None else kind_of(self._run.task))
        return self._run_directory

    def _active(self, what: str) -> Run:
        if self._run is None:
            raise ConfigError(f"trainer.{what} outside of fit, validate, test and predict.")
        return self._run

    def _run_info(self) -> RunInfo:
        """What trackers know of the run: the same object for a fit and the evaluations after it."""
        folder = self.run_directory
        if self._info is None or self._info.directory != folder:
            self._info = RunInfo(
                name=folder.name, project=self.settings.project_dir.name or "loopwright", directory=folder
            )
        return self._info

    def _tracker_config(self, task: Task) -> dict[str, Any]:
        return {"task": {"class": type(task).__name__, **task.hparams}, "trainer": self.config}


def _with_progress(callbacks: Callback | Sequence[Callback] | None, progress: bool) -> list[Callback]:
    """The callbacks as a list, with a progress bar if there is to be one."""
    if not isinstance(callbacks, (Callback, Iterable, NoneType)) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks={callbacks!r}. Expected a Callback or a list of them.")
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks holds {callback!r}, which is no Callback. Pass objects, such as EarlyStopping('val/loss')."
            )
    if not progress:
        return found
    from ..callbacks.progress import ProgressBar

    return found if any(isinstance(c, ProgressBar) for c in found) else [*found, ProgressBar()]
