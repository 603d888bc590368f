"""`Accelerator`: the layer for those who own their loop, and the one that the Trainer stands on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.profiling import ProfileKwargs, profiled
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..distributed.errors import ConfigError, check_boolean
from ..distributed.kinds import DistributedType
from ..distributed.memory import release_memory
from ..distributed.parallelism import ParallelismConfig
from ..distributed.process import ProcessState
from ..strategies.compiling import read_compiling
from ..strategies.deepspeed_plugin import DeepSpeedPlugin
from ..strategies.dynamo_plugin import TorchDynamoPlugin
from ..strategies.fsdp_plugin import FullyShardedDataParallelPlugin
from ..strategies.gradient_state import GradientAccumulationPlugin, GradientState
from ..strategies.handlers import AutocastKwargs, Handlers, KwargsHandler
from ..strategies.optimizer import GatedOptimizer
from ..strategies.precision import PrecisionLike
from ..strategies.registry import StrategyLike, split_fp8
from ..strategies.scheduler import GatedScheduler
from ..strategies.unscaling import unscale, unscale_for
from .accelerator_state import AcceleratorState
from .arguments import (
    read_accumulation,
    read_dataloader_config,
    read_dynamo,
    read_precision,
    read_process,
    read_project,
    read_rng_types,
    read_strategy,
    refuse_others,
)
from .checkpoint_methods import CheckpointMethods
from .data_methods import DataMethods
from .deepspeed_arguments import accumulation_of, find_deepspeed, precision_of
from .fp8_arguments import join_fp8
from .mesh_methods import MeshMethods, lay_out, read_parallelism_config, strategy_of
from .preparation import Preparation
from .process_readings import ProcessReadings
from .project import ProjectConfiguration
from .tracking_methods import LogWith, TrackingMethods


class Accelerator(ProcessReadings, DataMethods, MeshMethods, CheckpointMethods):
    """Prepares models, optimizers, loaders and schedulers, and carries out their steps.

    Names and meanings are those of Hugging Face Accelerate; `docs/from-accelerate.md` lists the differences. Where an
    argument is left out, its environment variable decides (`distributed/environment.py`).

    Making one is collective where a launcher has started several processes: they join one group, which further ones
    share.

    Args:
        device_placement: move models and batches to the device.
        mixed_precision: `"no"`, `"bf16"`, `"fp16"`, `"fp8"`, ..., as the Trainer's `precision`.
        gradient_accumulation_steps: micro-batches per optimizer step; 1 by default.
        cpu: stay on the CPU although there is an accelerator device.
        dataloader_config: how loaders are prepared.
        rng_types: random states that processes agree on at the beginning of a pass; in one process without effect.
        log_with: experiment trackers: a word, an object, or a list of these.
        project_dir: the folder of the project's files.
        project_config: the same with its further settings.
        gradient_accumulation_plugin: accumulation with its further settings, instead of the number alone.
        step_scheduler_with_optimizer: schedulers wait for their optimizers; False: they step whenever asked to.
        kwargs_handlers: settings for torch's own objects, at most one handler of each class.
        parallelism_config: how processes share the work: copies, parts of weights, of layers, of sequences.
        fsdp_plugin: options of FSDP, which is the strategy then.
        deepspeed_plugin: options of DeepSpeed, which is the strategy then; or several by name, of which the first is
            used until `accelerator.state.select_deepspeed_plugin(name)` chooses another.
        deepspeed_plugins: several by name.
        dynamo_backend: what compiles models, such as `"inductor"`, in `prepare` and in place; `"no"`: nothing.
        dynamo_plugin: the same with its further settings.
        strategy: how a step is carried out; `"auto"` is FSDP where the launcher was told so.
        scale_scheduler_by_processes: a schedule advances by the number of processes at each optimizer step, as
            Accelerate has it for schedules that were planned for the unsharded loader; False: by one.
        process: this process, where it is known already; by default what the launcher says of it.
        others: Accelerate's further arguments are refused unless they ask for nothing.
    Raises:
        ConfigError: an argument can't be used, or contradicts another.
        TypeError: an argument is unknown; names the nearest one.
    """

    def __init__(
        self,
        *,
        device_placement: bool = True,
        mixed_precision: PrecisionLike | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: LogWith = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[KwargsHandler] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        strategy: StrategyLike = "auto",
        scale_scheduler_by_processes: bool = True,
        process: ProcessState | None = None,
        **others: Any,
    ) -> None:
        refuse_others(others, Accelerator)
        check_boolean("device_placement", device_placement)
        check_boolean("step_scheduler_with_optimizer", step_scheduler_with_optimizer)
        check_boolean("scale_scheduler_by_processes", scale_scheduler_by_processes)
        check_boolean("cpu", bool(cpu) if cpu is None else cpu)
        plugin = read_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        strategy, fp8 = split_fp8(strategy)
        deepspeed = find_deepspeed(strategy, deepspeed_plugin, deepspeed_plugins)
        if deepspeed is not None:
            plugin = accumulation_of(deepspeed, plugin, gradient_accumulation_steps)
            mixed_precision, strategy = precision_of(deepspeed, mixed_precision), deepspeed
        self.handlers = Handlers(kwargs_handlers)
        self.process = read_process(cpu, self.handlers) if process is None else process
        """The process and its device."""
        TrackingMethods.__init__(self, log_with, read_project(project_dir, project_config), self.is_main_process)
        CheckpointMethods.__init__(self)
        self.device_placement = device_placement
        self.rng_types = read_rng_types(rng_types)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.gradient_state = GradientState(plugin)
        config = read_parallelism_config(parallelism_config, self.process)
        self.strategy = read_strategy(strategy_of(strategy, config), self.process, self.handlers, fsdp_plugin)
        self.process.device = self.strategy.choose_device(self.process)
        self.precision = read_precision(mixed_precision, self.device, self.handlers)
        self.strategy = join_fp8(self.strategy, fp8, self.precision, self.handlers)
        dynamo = read_dynamo(dynamo_backend, dynamo_plugin)
        self.state = AcceleratorState(
            self.precision, process=self.process, strategy=self.strategy, dynamo_plugin=dynamo
        )
        """The process, the precision and the plugins in one object, as Accelerate has it."""
        self.strategy.attach(self.process, self.precision, self.gradient_state)
        self.parallelism_config = lay_out(self.strategy, config)
        self._contexts = self.precision.contexts(self.handlers.get(AutocastKwargs))
        self.preparation = Preparation(
            self.strategy,
            read_dataloader_config(dataloader_config),
            device_placement=device_placement,
            context=self._contexts if self.precision.autocasts else None,
            scales_schedules=scale_scheduler_by_processes,
            step_with_optimizer=step_scheduler_with_optimizer,
            rng_types=self.rng_types,
            compiling=read_compiling(dynamo),
        )

    # Preparing.

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare objects for training: models, optimizers, loaders and schedulers; others pass through.

        Args:
            args: in any order. A model and its optimizers belong into one call.
            device_placement: for each of them, whether it is moved to the device.
        Returns:
            What they became, in the same order; one object alone is not in a tuple. Preparing again changes nothing.
        Raises:
            ConfigError: `device_placement` has another length, or a combination can't work.
        """
        prepared = self.preparation.prepare(args, device_placement)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model as it is called from now on; with `evaluation_mode` it is not made ready for training."""
        return self.preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> GatedOptimizer:
        """An optimizer that steps where gradients synchronise."""
        return self.preparation.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> GatedScheduler:
        """A scheduler that steps where its optimizer did."""
        return self.preparation.scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: Iterable[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """Any iterable of batches as a loader of this process.

        Args:
            data_loader: a `DataLoader`, a list, ...
            device_placement: whether its batches are moved to the device.
            slice_fn_for_dispatch: cuts one process's share out of what the main process has read and hands out: called
                with the batch, a slice of its rows, the process's index and the number of processes.
        """
        return self.preparation.loader(data_loader, device_placement, slice_fn=slice_fn_for_dispatch)

    # Stepping.

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """The context of one micro-batch: decides whether the optimizer steps after it.

        Args:
            models: the prepared models that are called in it; they don't reduce gradients while these accumulate.
        Raises:
            ConfigError: one is no module.
        """
        for model in models:
            _check_module("accumulate", model)
        self.gradient_state.advance()
        if self.sync_gradients or self.gradient_state.plugin.sync_each_batch:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward does not reduce the model's gradients over processes."""
        _check_module("no_sync", model)
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context whose next backward reduces the model's gradients, although its forward was under `no_sync`."""
        _check_module("trigger_sync_in_backward", model)
        return self.strategy.trigger_sync(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of a micro-batch's loss, divided by `gradient_accumulation_steps` and scaled as fp16 needs it.

        Args:
            loss: a scalar.
            kwargs: as `Tensor.backward` takes them.
        Raises:
            ConfigError: it is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise ConfigError(f"backward got a {type(loss).__name__}. Expected the loss as a tensor with a gradient.")
        self.strategy.backward(loss, **kwargs)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context in which forward passes run, for what is computed outside of prepared models.

        Args:
            autocast_handler: other settings than those of `kwargs_handlers`.
        Raises:
            ConfigError: it is no `AutocastKwargs`.
        """
        if autocast_handler is not None and not isinstance(autocast_handler, AutocastKwargs):
            raise ConfigError(f"autocast got {autocast_handler!r:.80}. Expected AutocastKwargs(...), or None.")
        return self._contexts() if autocast_handler is None else self.precision.contexts(autocast_handler)()

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Bring gradients back to their true size, once per step; does nothing unless the precision is fp16.

        Args:
            optimizer: of the prepared ones, one or several; by default all that have a gradient.
        Raises:
            ConfigError: gradients are still being accumulated.
        """
        chosen = self.preparation.optimizers if optimizer is None else optimizer
        unscale(self.strategy, [chosen] if isinstance(chosen, Optimizer) else chosen)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`, unscaled first in fp16.

        Call it where `sync_gradients` is true.

        Args:
            parameters: whose gradients are taken together.
            max_norm: the largest norm that they keep.
            norm_type: the p of the norm, also `inf`.
        Returns:
            The norm before, a scalar on the device; 0 without gradients.
        Raises:
            ConfigError: these are no parameters.
        """
        chosen = _tensors("clip_grad_norm_", parameters)
        unscale_for(self.strategy, chosen, self.preparation.optimizers)
        return self.strategy.clip_grad_norm(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each element of the gradients to the range from `-clip_value` to `clip_value`, unscaled first in fp16."""
        chosen = _tensors("clip_grad_value_", parameters)
        unscale_for(self.strategy, chosen, self.preparation.optimizers)
        if any(parameter.grad is not None for parameter in chosen):
            self.strategy.clip_grad_value(chosen, clip_value)

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The options of DeepSpeed that are used; None where it was given none."""
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are spread over the processes by torch's `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window, so that the optimizer steps after it."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def step(self) -> int:
        """Micro-batches since the newest window that a loader's end has closed, under `accumulate`; it may be set."""
        return self.gradient_state.micro_steps

    @step.setter
    def step(self, value: int) -> None:
        self.gradient_state.micro_steps = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; it may be set at any time."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.preparation.change_num_steps(value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the newest step of any prepared optimizer was dropped for an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.preparation.optimizers)

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"bf16"`, `"fp16"`, `"fp8"`, `"bf16-true"` or `"fp16-true"`."""
        return self.precision.name

    @property
    def recompilations(self) -> dict[str, int]:
        """How often this process compiled anew what is compiled, since the first `prepare` that compiled a model; by
        the names of its modules.
        """
        return self.preparation.recompilations.counts

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16, None where losses are not scaled."""
        return self.precision.scaler

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """A context whose body is recorded, on every process; gives the profiler. Collective.

        Args:
            profile_handler: other settings than those of `kwargs_handlers`.
        Raises:
            ConfigError: it is no `ProfileKwargs`.
        """
        settings = self.handlers.get(ProfileKwargs) if profile_handler is None else profile_handler
        if not isinstance(settings, ProfileKwargs):
            raise ConfigError(f"profile got {settings!r:.80}. Expected ProfileKwargs(...), or None.")
        with profiled(settings, self.process_index) as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            self.wait_for_everyone()  # so that every trace is there when one process goes on

    # Afterwards.

    def end_training(self) -> None:
        """Close the run in every tracker, and leave the group of processes. Nothing collective may follow."""
        super().end_training()
        self.process.destroy_process_group()

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all that was prepared, collect garbage and give cached memory back.

        Usage: `model, optimizer = accelerator.free_memory(model, optimizer)`.

        Returns:
            None for each object.
        """
        count = len(objects)
        del objects
        self.preparation.clear()
        self.strategy.teardown()
        self.strategy.forget_models()
        self.gradient_state.micro_steps = 0
        return release_memory(*[None] * count)

    clear = free_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # What holds an Accelerator, a model for one, goes on with the same after it was copied.
        return self


def _check_module(operation: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{operation} got a {type(model).__name__}. Expected models, as prepare gave them.")


def _tensors(operation: str, parameters: object) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise ConfigError(
            f"{operation} got a {type(parameters).__name__}. Expected parameters, such as model.parameters()."
        )
    return list(parameters)
