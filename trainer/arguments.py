"""What the arguments of an `Accelerator` and the environment mean together. An argument that was given wins."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..data.configuration import DataLoaderConfiguration
from ..distributed.environment import read_flag, read_int, read_variable
from ..distributed.errors import ConfigError, suggest
from ..distributed.group import is_connected
from ..distributed.process import ProcessState
from ..strategies.ddp import DDPStrategy
from ..strategies.dynamo_plugin import TorchDynamoPlugin
from ..strategies.fsdp import FSDPStrategy
from ..strategies.fsdp_plugin import FullyShardedDataParallelPlugin
from ..strategies.gradient_state import GradientAccumulationPlugin, check_num_steps
from ..strategies.handlers import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
)
from ..strategies.precision import PRECISIONS, MixedPrecision, Precision, PrecisionLike, create_precision
from ..strategies.registry import AUTO, DDP, FSDP, XLA, StrategyLike, create_strategy
from ..strategies.strategy import Strategy
from .project import ProjectConfiguration

RNG_TYPES = ("torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator")
"""Random states that processes can be brought to agree on, by Accelerate's words."""

# Arguments that Accelerate has, and what to do here in place of them.
_ABSENT = {
    "megatron_lm_plugin": "Megatron-LM is not available.",
    "torch_tp_plugin": "Use parallelism_config=ParallelismConfig(tp_size=...).",
    "split_batches": "Use dataloader_config=DataLoaderConfiguration(split_batches=...).",
    "dispatch_batches": "Use dataloader_config=DataLoaderConfiguration(dispatch_batches=...).",
    "even_batches": "Use dataloader_config=DataLoaderConfiguration(even_batches=...).",
    "use_seedable_sampler": "Use dataloader_config=DataLoaderConfiguration(use_seedable_sampler=...).",
    "logging_dir": "Use project_dir=, or project_config=ProjectConfiguration(logging_dir=...).",
    "fp16": "Use mixed_precision='fp16'.",
}


def refuse_others(others: Mapping[str, Any], cls: type) -> None:
    """Refuse arguments that a class does not have; Accelerate's that are None or "no" ask for nothing.

    Raises:
        ConfigError: it is one of Accelerate's; says what to use in place of it.
        TypeError: it is unknown; names the nearest one.
    """
    for name, value in others.items():
        if name not in _ABSENT:
            known = set(inspect.signature(cls).parameters) - {"others"}
            raise TypeError(f"Accelerator({name}={value!r}) is unknown. {suggest(name, known)}")
        if value is not None and str(value).lower() != "no":
            raise ConfigError(f"Accelerator({name}={value!r}) can't be used here. {_ABSENT[name]} Leave it out.")


def read_dataloader_config(given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """How loaders are prepared.

    Raises:
        ConfigError: it is something else.
    """
    if given is None:
        return DataLoaderConfiguration()
    if not isinstance(given, DataLoaderConfiguration):
        raise ConfigError(
            f"dataloader_config={given!r:.80}. Expected a DataLoaderConfiguration, such as "
            "DataLoaderConfiguration(split_batches=True), or None."
        )
    return given


def read_process(cpu: bool | None, handlers: Handlers) -> ProcessState:
    """This process; on the device that the environment names, where no argument decides. Collective.

    Raises:
        ConfigError: a variable can't be read.
        LaunchError: the other processes could not be joined.
    """
    group_options = handlers.get(InitProcessGroupKwargs).to_kwargs()
    if group_options and is_connected():
        warnings.warn(
            f"InitProcessGroupKwargs({', '.join(f'{k}={v}' for k, v in group_options.items())}) has no effect: the "
            "processes are in a group already. Make this Accelerator first, or set them where the group is made.",
            stacklevel=3,
        )
    process = ProcessState(cpu=bool(read_flag("USE_CPU") if cpu is None else cpu), **group_options)
    device = read_variable("TORCH_DEVICE")
    if cpu is None and device is not None:
        try:
            process.device = torch.device(device[1])
        except RuntimeError as error:
            raise ConfigError(f"{device[0]}={device[1]!r} is no device: {error}. Expected such as 'cuda:1'.") from error
    return process


def read_strategy(
    spec: StrategyLike,
    process: ProcessState,
    handlers: Handlers,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
) -> Strategy:
    """How steps are carried out. A word that means DDP takes its options from the handler for it, one that means FSDP
    from the plugin or its variables.

    Raises:
        ConfigError: it is unknown, or options are given here and there.
    """
    handler, num_processes = handlers.get(DistributedDataParallelKwargs), process.num_processes
    plugin = _find_fsdp(spec, fsdp_plugin, process.is_main_process)
    if plugin is not None:
        return _from_plugin(plugin, process, handler)
    if spec == AUTO and read_flag("USE_XLA"):
        return create_strategy(XLA, num_processes)
    if spec == DDP or (spec == AUTO and num_processes > 1):
        return DDPStrategy.from_handler(handler)
    if not isinstance(spec, str) and handler != DistributedDataParallelKwargs():
        raise ConfigError(
            f"kwargs_handlers holds {handler}, and strategy={spec!r} has options of its own. Give them in one place: "
            "with the handler use strategy='ddp' or 'auto'."
        )
    return create_strategy(spec, num_processes)


def _find_fsdp(
    spec: StrategyLike, given: FullyShardedDataParallelPlugin | None, warns: bool
) -> FullyShardedDataParallelPlugin | None:
    """The options of FSDP, as they were given or as the environment has them; None where it is not FSDP.

    Args:
        spec: the strategy as it was given.
        given: the plugin as it was given.
        warns: whether this process says that the variable is not used.
    Raises:
        ConfigError: it is something else, or contradicts the strategy.
    """
    if given is not None:
        if not isinstance(given, FullyShardedDataParallelPlugin):
            raise ConfigError(f"fsdp_plugin={given!r:.80}. Expected FullyShardedDataParallelPlugin(...), or None.")
        if spec not in (AUTO, FSDP):
            raise ConfigError(
                f"strategy={spec!r} and fsdp_plugin=FullyShardedDataParallelPlugin(...) were both given. Leave "
                "strategy out, or give the options of FSDP there: strategy={'name': 'fsdp', 'wrap': ...}."
            )
        return given
    if not read_flag("USE_FSDP"):
        return None
    if spec in (AUTO, FSDP):
        return FullyShardedDataParallelPlugin()
    found = read_variable("USE_FSDP")
    if found is not None and warns:
        warnings.warn(f"{found[0]}={found[1]} is not used: strategy={spec!r:.80} was given.", stacklevel=4)
    return None


def _from_plugin(
    plugin: FullyShardedDataParallelPlugin, process: ProcessState, handler: DistributedDataParallelKwargs
) -> Strategy:
    """FSDP with the options of a plugin. What it translates or leaves out is said once, on the main process."""
    text = plugin.explanation()
    if text is not None and process.is_main_process:
        warnings.warn(text, stacklevel=4)
    unused = {name for name in handler.to_kwargs() if name != "find_unused_parameters"}
    if unused and process.is_main_process:
        warnings.warn(
            f"DistributedDataParallelKwargs({', '.join(sorted(unused))}) has no effect under FSDP.", stacklevel=4
        )
    if plugin.cpu_ram_efficient_loading:
        plugin.tell_transformers()
    return FSDPStrategy.from_plugin(
        plugin,
        process.num_processes,
        process.place.num_nodes,
        find_unused_parameters=handler.find_unused_parameters,
    )


def read_accumulation(num_steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """How gradients are accumulated.

    Raises:
        ConfigError: number and plugin contradict each other, or the number is none.
    """
    if plugin is not None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            raise ConfigError(
                f"gradient_accumulation_plugin={plugin!r:.80}. Expected GradientAccumulationPlugin(...), or None."
            )
        if num_steps not in (None, 1):
            raise ConfigError(
                f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin={plugin} were both given. "
                "Give the plugin alone, with num_steps in it."
            )
        return plugin
    if num_steps is not None:
        return GradientAccumulationPlugin(num_steps=check_num_steps(num_steps, "gradient_accumulation_steps"))
    found = read_int("GRADIENT_ACCUMULATION_STEPS")
    return GradientAccumulationPlugin(
        num_steps=1 if found is None else check_num_steps(found, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    )


def read_dynamo(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How models are compiled.

    Raises:
        ConfigError: backend and plugin were both given, or one can't be used.
    """
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(f"dynamo_plugin={plugin!r:.80}. Expected TorchDynamoPlugin(...), or None.")
    if backend is not None:
        raise ConfigError(
            f"dynamo_backend={backend!r} and dynamo_plugin={plugin} were both given. Give the plugin alone, with the "
            "backend in it."
        )
    return plugin


def read_precision(name: PrecisionLike | None, device: torch.device, handlers: Handlers) -> Precision:
    """The number formats of a step.

    Raises:
        ConfigError: the word or an option is unknown, or the device can't compute in that format.
    """
    if name is None and (found := read_variable("MIXED_PRECISION")) is not None:
        name = found[1]
        if name not in PRECISIONS:
            raise ConfigError(f"{found[0]}={name!r} is unknown. {suggest(name, PRECISIONS)}")
    if not isinstance(name, str) or PRECISIONS.get(name) != "fp16":
        return create_precision(name, device)
    settings = handlers.get(GradScalerKwargs)
    if not settings.enabled:
        return MixedPrecision(device, "fp16")
    return create_precision(name, device, scaler=torch.amp.GradScaler(device.type, **settings.to_kwargs()))


def read_project(
    project_dir: str | os.PathLike[str] | None, configuration: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Where files go: as configured, with the folder that was given where the configuration has none.

    Raises:
        ConfigError: the configuration is something else.
    """
    if not isinstance(configuration, ProjectConfiguration | None):
        raise ConfigError(f"project_config={configuration!r:.80}. Expected ProjectConfiguration(...), or None.")
    if configuration is None:
        return ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and configuration.project_dir is None:
        configuration.set_directories(project_dir)
    return configuration


def read_rng_types(rng_types: Iterable[Any] | None) -> list[str]:
    """Which random states processes agree on.

    Raises:
        ConfigError: one is unknown.
    """
    if isinstance(rng_types, str) or not isinstance(rng_types, Iterable | None):
        raise ConfigError(f"rng_types={rng_types!r:.80}. Expected a list of words, such as ['generator', 'torch'].")
    words = ["generator"] if rng_types is None else [str(getattr(item, "value", item)) for item in rng_types]
    for word in words:
        if word not in RNG_TYPES:
            raise ConfigError(f"rng_types holds {word!r}, which is unknown. {suggest(word, RNG_TYPES)}")
    return words
