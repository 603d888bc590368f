"""The names that users of Accelerate import from `accelerate.utils`."""

from __future__ import annotations

from .callbacks.profiling import ProfileKwargs
from .cli.launch_config import write_basic_config
from .data.configuration import DataLoaderConfiguration
from .data.sizes import find_batch_size
from .distributed.environment import (
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)
from .distributed.kinds import DistributedType
from .distributed.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from .distributed.nested import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_device,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from .distributed.operations import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    wait_for_everyone,
)
from .distributed.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from .distributed.process import PartialState
from .distributed.progress import tqdm
from .distributed.random import set_seed, synchronize_rng_state, synchronize_rng_states
from .distributed.units import convert_file_size_to_int
from .strategies.communication import DDPCommunicationHookType
from .strategies.deepspeed_dummies import DummyOptim, DummyScheduler
from .strategies.deepspeed_plugin import DeepSpeedPlugin, HfDeepSpeedConfig
from .strategies.dynamo_plugin import TorchDynamoPlugin
from .strategies.forward import extract_model_from_parallel, is_compiled_module
from .strategies.fp8_recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .strategies.fsdp_plugin import FullyShardedDataParallelPlugin
from .strategies.gradient_state import GradientAccumulationPlugin
from .strategies.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from .trackers.kinds import LoggerType
from .trainer.project import ProjectConfiguration

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HfDeepSpeedConfig",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "clear_environment",
    "concatenate",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_int_from_env",
    "honor_type",
    "is_compiled_module",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "should_reduce_batch_size",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]
