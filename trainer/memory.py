"""What a run will hold in memory under each strategy, worked out before it: see `plan_memory`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ..data.sizes import AmbiguousBatchSizeError, find_batch_size
from ..distributed.errors import ConfigError, check_integer
from ..distributed.nested import slice_tensors
from ..distributed.random import preserved_random_state
from ..distributed.units import convert_file_size_to_int, size_bytes
from ..strategies.memory import OptimizerMemory, StrategyMemory, Subject, Surroundings, TracedStep, TraceOptions
from ..strategies.memory_candidates import candidates
from ..strategies.memory_log import tensors_of
from ..strategies.memory_optimizer import optimizer_memory
from .memory_report import MemoryPlan, MemoryRow
from .memory_trace import trace_step
from .run import Run, Training

T = TypeVar("T")


def read_memory_options(world_size: object, device_memory: object) -> tuple[int | None, int | None]:
    """The number of processes and the bytes of a device, as a plan is given them.

    Raises:
        ConfigError: one can't be used.
    """
    if world_size is not None:
        check_integer("world_size", world_size, 1, "It counts processes.")
    if isinstance(device_memory, str) and device_memory.strip().replace(".", "", 1).isdigit():
        raise ConfigError(f"device_memory={device_memory!r} has no unit. Expected such as '{device_memory}GB'.")
    try:
        size = None if device_memory is None else convert_file_size_to_int(device_memory)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(
            f"device_memory={device_memory!r}. Expected a number of bytes, or text such as '80GB', '24GiB'."
        ) from error
    if size == 0:
        raise ConfigError(f"device_memory={device_memory!r} is nothing. Expected such as '80GB'.")
    return world_size, size  # type: ignore[return-value]


def plan_memory(
    run: Run, training: Training, world_size: int | None, device_memory: int | None, *, takes_batch: bool = True
) -> MemoryPlan:
    """What each strategy holds in each of so many processes, and which is the simplest that fits. Local.

    Nothing is allocated: the model may be on the meta device, and its step is traced on tensors without data.

    Args:
        run: of the task.
        training: what `fit` would work with.
        world_size: processes; None: those of the run.
        device_memory: bytes of a device; None: unknown.
        takes_batch: whether the training data is as before when a batch was taken.
    Raises:
        ConfigError: the run's strategy can't serve so many processes, or a parameter has no shape yet.
    """
    process = run.trainer.process
    _check_shapes(run.task)
    count = world_size or process.num_processes
    surroundings = Surroundings(count, run.precision.compute_format)
    tracing = _Tracing(run, training, count, takes_batch)
    plan = MemoryPlan(
        count,
        device_memory,
        batch_samples=_num_samples(tracing.batch),
        computes_in_16_bits=surroundings.compute_format in (torch.bfloat16, torch.float16),
        notes=tracing.notes,
    )
    own = run.strategy.memory(surroundings)
    if own is None and count == process.num_processes:
        plan.notes.append(f"what {type(run.strategy).__name__} holds can't be told, and is not among these.")
    for candidate in candidates(run.strategy, surroundings):
        plan.rows.append(_row(candidate, tracing.subject, is_own=candidate == own))
    plan.recommend()
    return plan


def _check_shapes(model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {path} of {type(model).__name__} has no shape yet, as its layer is lazy, so that nothing "
                "can be said of its memory. Give the layer its sizes, or call the model once in configure_model."
            )


def _row(memory: StrategyMemory, subject: Subject, *, is_own: bool) -> MemoryRow:
    """What a strategy holds, or why it can't be used."""
    try:
        memory.check(subject)
    except ConfigError as error:
        return MemoryRow(memory.spec, None, is_own, str(error))
    return MemoryRow(memory.spec, memory.footprint(subject), is_own)


def built_on_meta(build: Callable[[], T], what: str) -> tuple[T | None, str]:
    """What a function builds of modules, without memory for their weights; None and the reason where it can't be."""
    try:
        with torch.device("meta"):
            return build(), ""
    except Exception as error:  # noqa: BLE001  (it is built for real then, and the plan says so)
        return None, f"the model was built with its memory: {what} can't run on the meta device ({_shown(error)})."


class _Tracing:
    """Traces of one task and of steps of its optimizers, each made once.

    Args:
        run: of the task.
        training: what `fit` would work with.
        num_processes: for which it is planned.
        takes_batch: as `plan_memory` is told.
    """

    def __init__(self, run: Run, training: Training, num_processes: int, takes_batch: bool) -> None:
        self._run, self._training = run, training
        self.notes: list[str] = []
        """What could not be told, in sentences."""
        self.batch = self._first_batch(num_processes) if takes_batch else None
        """None: unknown."""
        if not takes_batch:
            self.notes.append("activations are not known: the training data is an iterator, and a plan takes nothing.")
        elif not training.is_automatic:
            self.notes.append("activations are not known: a task in manual mode can't be traced.")
        self._can_trace = self.batch is not None and training.is_automatic
        self._can_step = True
        self._traces: dict[tuple[Any, ...], TracedStep | None] = {}
        self._steps: dict[tuple[tuple[int, ...], ...], OptimizerMemory | None] = {}
        device = run.trainer.process.device
        held = training.window_size if device.type == "cpu" else 1
        self.subject = Subject(
            model=run.task,
            window_size=training.window_size,
            batch_bytes=held * size_bytes(tensors_of(self.batch)),
            device=device,
            trace=self._trace,
            step=self._step,
            optimizers=training.optimizers,
            is_automatic=training.is_automatic,
        )

    def _first_batch(self, num_processes: int) -> Any:
        """A batch of one process."""
        loader = self._training.loader.loader
        with preserved_random_state(self._run.trainer.process.device), _preserved_generators(loader):
            batch = next(_batches(loader), None)
        splits = self._run.trainer.accelerator.dataloader_config.split_batches
        share = num_processes // self._run.trainer.process.num_processes if splits else 1
        size = find_batch_size(batch) if share > 1 else None
        return batch if size is None else slice_tensors(batch, slice(0, max(1, size // share)))

    def _trace(self, options: TraceOptions) -> TracedStep | None:
        facts = (options.recomputes, options.keeps_outputs, options.compute_format)
        key = (*map(id, options.units), *facts, *map(id, options.left_alone))
        if key not in self._traces:
            run, step = self._run, self._training.step
            self._traces[key] = self._tried(lambda: trace_step(run.task, step, self.batch, run.device, options))
        return self._traces[key]

    def _tried(self, trace: Callable[[], TracedStep]) -> TracedStep | None:
        if not self._can_trace:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run itself will say them
                return trace()
        except Exception as error:  # noqa: BLE001  (the plan says it, and goes on without this number)
            self._can_trace = False
            self.notes.append(
                "activations are not known: training_step can't run on tensors without data, on whose values it may "
                f"not depend ({_shown(error)})."
            )
            return None

    def _step(self, shape_of: Callable[[Tensor], tuple[int, ...]]) -> OptimizerMemory | None:
        groups = (group for optimizer in self._training.optimizers for group in optimizer.param_groups)
        shapes = tuple(shape_of(parameter) for group in groups for parameter in group["params"])
        if shapes not in self._steps:
            self._steps[shapes] = self._stepped(shape_of)
        return self._steps[shapes]

    def _stepped(self, shape_of: Callable[[Tensor], tuple[int, ...]]) -> OptimizerMemory | None:
        if not self._can_step:
            return None
        device = self._run.device
        try:
            found = [optimizer_memory(each, shape_of, device) for each in self._training.optimizers]
        except Exception as error:  # noqa: BLE001  (as above)
            self._can_step = False
            names = ", ".join(type(each).__name__ for each in self._training.optimizers)
            self.notes.append(
                f"the optimizer's state is not known: {names} can't step on tensors without data ({_shown(error)})."
            )
            return None
        return OptimizerMemory(sum(each.state for each in found), max((each.temporary for each in found), default=0))


def _batches(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, the first one without its worker processes where that can be."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        dataset: Any = loader.dataset
        if not isinstance(dataset, IterableDataset):
            several = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[index] for index in indices])
            return (loader.collate_fn(several(indices)) for indices in loader.batch_sampler)
    return iter(loader)


@contextmanager
def _preserved_generators(loader: Any) -> Iterator[None]:
    """A context after which the loader's own generators stand where they stood: no order of samples changes."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
    states = [(generator, generator.get_state()) for generator in found]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _num_samples(batch: Any) -> int | None:
    try:
        return find_batch_size(batch)
    except AmbiguousBatchSizeError:
        return None  # a run goes on as well, and only asks where a mean is logged


def _shown(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.120}" if text else type(error).__name__
