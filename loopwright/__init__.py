"""Loopwright: a training framework for PyTorch that is exact, fast, and easy to read.

Every public name is listed in `__all__` and loads when it is first used, so that `import loopwright` costs next to
nothing and imports neither torch nor an optional package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in the order of `sorted`, as a test wants it
    "AORecipeKwargs",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "BatchSamplerShard",
    "CSVTracker",
    "Callback",
    "CheckpointError",
    "CollectiveTimeoutError",
    "CombinedLoader",
    "ConfigError",
    "DDPCommunicationHookType",
    "DDPStrategy",
    "DataError",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedStrategy",
    "DistributedDataParallelKwargs",
    "DistributedError",
    "DistributedType",
    "Duration",
    "EMA",
    "EarlyStopping",
    "EndEpoch",
    "EventTimer",
    "FP8Strategy",
    "FSDPStrategy",
    "FullyShardedDataParallelPlugin",
    "GarbageCollection",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientMonitor",
    "GradientState",
    "InitProcessGroupKwargs",
    "Interval",
    "IterableDatasetShard",
    "JSONLTracker",
    "LaunchError",
    "LearningRateMonitor",
    "LocalSGD",
    "LoggerType",
    "LoopwrightError",
    "MLflowTracker",
    "MSAMPRecipeKwargs",
    "MemoryTracker",
    "MetricError",
    "MissingDependencyError",
    "ModelCheckpoint",
    "ModelSummary",
    "NaNGuard",
    "NonFiniteError",
    "ParallelismConfig",
    "PartialState",
    "PeerFailedError",
    "PipelineStrategy",
    "Plan",
    "Preemption",
    "Presharded",
    "ProcessState",
    "ProfileKwargs",
    "Profiler",
    "ProgressBar",
    "ProjectConfiguration",
    "RollBack",
    "RunState",
    "SWA",
    "ShapeMismatchError",
    "SingleDeviceStrategy",
    "SkipBatch",
    "StepOutcome",
    "StopRun",
    "StragglerMonitor",
    "Strategy",
    "TERecipeKwargs",
    "Task",
    "TaskError",
    "TensorBoardTracker",
    "ThroughputMonitor",
    "Timer",
    "TorchDynamoPlugin",
    "Tracker",
    "TrackerError",
    "Trainer",
    "WandbTracker",
    "XLAStrategy",
    "create_optimizer",
    "debug_launcher",
    "find_executable_batch_size",
    "get_logger",
    "load_weights",
    "notebook_launcher",
    "register_strategy",
    "register_tracker",
    "save_weights",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]

# Where each name is defined. The block for type checkers below says the same; a test compares them.
_NAMES_OF_MODULE = {
    "callbacks.callback": ("Callback", "EndEpoch", "SkipBatch", "StopRun"),
    "callbacks.checkpoint": ("ModelCheckpoint",),
    "callbacks.early_stopping": ("EarlyStopping",),
    "callbacks.ema": ("EMA",),
    "callbacks.event_timer": ("EventTimer",),
    "callbacks.garbage": ("GarbageCollection",),
    "callbacks.gradients": ("GradientMonitor",),
    "callbacks.intervals": ("Duration", "Interval"),
    "callbacks.learning_rate": ("LearningRateMonitor",),
    "callbacks.nan_guard": ("NaNGuard",),
    "callbacks.preemption": ("Preemption",),
    "callbacks.profiler": ("Profiler",),
    "callbacks.profiling": ("ProfileKwargs",),
    "callbacks.progress": ("ProgressBar",),
    "callbacks.roll_back": ("RollBack",),
    "callbacks.state": ("RunState",),
    "callbacks.stragglers": ("StragglerMonitor",),
    "callbacks.summary": ("ModelSummary",),
    "callbacks.swa": ("SWA",),
    "callbacks.throughput": ("ThroughputMonitor",),
    "callbacks.timer": ("Timer",),
    "checkpoint.weights": ("load_weights", "save_weights"),
    "data.combined": ("CombinedLoader",),
    "data.configuration": ("DataLoaderConfiguration",),
    "data.prepare": ("Presharded",),
    "data.shards": ("BatchSamplerShard", "IterableDatasetShard"),
    "data.skip": ("skip_first_batches",),
    "distributed.errors": (
        "CheckpointError",
        "CollectiveTimeoutError",
        "ConfigError",
        "DataError",
        "DistributedError",
        "LaunchError",
        "LoopwrightError",
        "MetricError",
        "MissingDependencyError",
        "NonFiniteError",
        "PeerFailedError",
        "ShapeMismatchError",
        "TaskError",
        "TrackerError",
    ),
    "distributed.kinds": ("DistributedType",),
    "distributed.launchers": ("debug_launcher", "notebook_launcher"),
    "distributed.logger": ("get_logger",),
    "distributed.memory": ("find_executable_batch_size",),
    "distributed.parallelism": ("ParallelismConfig",),
    "distributed.process": ("PartialState", "ProcessState"),
    "distributed.random": ("set_seed", "synchronize_rng_states"),
    "strategies.communication": ("DDPCommunicationHookType",),
    "strategies.ddp": ("DDPStrategy",),
    "strategies.deepspeed": ("DeepSpeedStrategy",),
    "strategies.deepspeed_plugin": ("DeepSpeedPlugin",),
    "strategies.dynamo_plugin": ("TorchDynamoPlugin",),
    "strategies.fp8": ("FP8Strategy",),
    "strategies.fp8_recipes": ("AORecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"),
    "strategies.fsdp": ("FSDPStrategy",),
    "strategies.fsdp_plugin": ("FullyShardedDataParallelPlugin",),
    "strategies.gradient_state": ("GradientAccumulationPlugin", "GradientState"),
    "strategies.handlers": (
        "AutocastKwargs",
        "DistributedDataParallelKwargs",
        "GradScalerKwargs",
        "InitProcessGroupKwargs",
    ),
    "strategies.local_sgd": ("LocalSGD",),
    "strategies.named_optimizers": ("create_optimizer",),
    "strategies.outcome": ("StepOutcome",),
    "strategies.pipeline": ("PipelineStrategy",),
    "strategies.registry": ("register_strategy",),
    "strategies.single": ("SingleDeviceStrategy",),
    "strategies.strategy": ("Strategy",),
    "strategies.xla": ("XLAStrategy",),
    "trackers.csv": ("CSVTracker",),
    "trackers.jsonl": ("JSONLTracker",),
    "trackers.kinds": ("LoggerType",),
    "trackers.memory": ("MemoryTracker",),
    "trackers.mlflow": ("MLflowTracker",),
    "trackers.registry": ("register_tracker",),
    "trackers.tensorboard": ("TensorBoardTracker",),
    "trackers.tracker": ("Tracker",),
    "trackers.wandb": ("WandbTracker",),
    "trainer.accelerator": ("Accelerator",),
    "trainer.accelerator_state": ("AcceleratorState",),
    "trainer.plan_report": ("Plan",),
    "trainer.project": ("ProjectConfiguration",),
    "trainer.task": ("Task",),
    "trainer.trainer": ("Trainer",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

if TYPE_CHECKING:
    from .callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun
    from .callbacks.checkpoint import ModelCheckpoint
    from .callbacks.early_stopping import EarlyStopping
    from .callbacks.ema import EMA
    from .callbacks.event_timer import EventTimer
    from .callbacks.garbage import GarbageCollection
    from .callbacks.gradients import GradientMonitor
    from .callbacks.intervals import Duration, Interval
    from .callbacks.learning_rate import LearningRateMonitor
    from .callbacks.nan_guard import NaNGuard
    from .callbacks.preemption import Preemption
    from .callbacks.profiler import Profiler
    from .callbacks.profiling import ProfileKwargs
    from .callbacks.progress import ProgressBar
    from .callbacks.roll_back import RollBack
    from .callbacks.state import RunState
    from .callbacks.stragglers import StragglerMonitor
    from .callbacks.summary import ModelSummary
    from .callbacks.swa import SWA
    from .callbacks.throughput import ThroughputMonitor
    from .callbacks.timer import Timer
    from .checkpoint.weights import load_weights, save_weights
    from .data.combined import CombinedLoader
    from .data.configuration import DataLoaderConfiguration
    from .data.prepare import Presharded
    from .data.shards import BatchSamplerShard, IterableDatasetShard
    from .data.skip import skip_first_batches
    from .distributed.errors import (
        CheckpointError,
        CollectiveTimeoutError,
        ConfigError,
        DataError,
        DistributedError,
        LaunchError,
        LoopwrightError,
        MetricError,
        MissingDependencyError,
        NonFiniteError,
        PeerFailedError,
        ShapeMismatchError,
        TaskError,
        TrackerError,
    )
    from .distributed.kinds import DistributedType
    from .distributed.launchers import debug_launcher, notebook_launcher
    from .distributed.logger import get_logger
    from .distributed.memory import find_executable_batch_size
    from .distributed.parallelism import ParallelismConfig
    from .distributed.process import PartialState, ProcessState
    from .distributed.random import set_seed, synchronize_rng_states
    from .strategies.communication import DDPCommunicationHookType
    from .strategies.ddp import DDPStrategy
    from .strategies.deepspeed import DeepSpeedStrategy
    from .strategies.deepspeed_plugin import DeepSpeedPlugin
    from .strategies.dynamo_plugin import TorchDynamoPlugin
    from .strategies.fp8 import FP8Strategy
    from .strategies.fp8_recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from .strategies.fsdp import FSDPStrategy
    from .strategies.fsdp_plugin import FullyShardedDataParallelPlugin
    from .strategies.gradient_state import GradientAccumulationPlugin, GradientState
    from .strategies.handlers import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from .strategies.local_sgd import LocalSGD
    from .strategies.named_optimizers import create_optimizer
    from .strategies.outcome import StepOutcome
    from .strategies.pipeline import PipelineStrategy
    from .strategies.registry import register_strategy
    from .strategies.single import SingleDeviceStrategy
    from .strategies.strategy import Strategy
    from .strategies.xla import XLAStrategy
    from .trackers.csv import CSVTracker
    from .trackers.jsonl import JSONLTracker
    from .trackers.kinds import LoggerType
    from .trackers.memory import MemoryTracker
    from .trackers.mlflow import MLflowTracker
    from .trackers.registry import register_tracker
    from .trackers.tensorboard import TensorBoardTracker
    from .trackers.tracker import Tracker
    from .trackers.wandb import WandbTracker
    from .trainer.accelerator import Accelerator
    from .trainer.accelerator_state import AcceleratorState
    from .trainer.plan_report import Plan
    from .trainer.project import ProjectConfiguration
    from .trainer.task import Task
    from .trainer.trainer import Trainer
else:
    # Type checkers don't see this function: to them it would make every misspelt name a known one.
    def __getattr__(name: str) -> object:
        module = _MODULE_OF_NAME.get(name)
        if module is None:
            raise AttributeError(_unknown_name(name))
        value = getattr(importlib.import_module(f".{module}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _unknown_name(name: str) -> str:
    import difflib  # here: only a misspelt name pays for it

    near = difflib.get_close_matches(name, __all__, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "dir(loopwright) lists the public names."
    return f"module {__name__!r} has no attribute {name!r}. {hint}"
