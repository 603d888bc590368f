"""Environment variables: every one that this package reads, in one table, and how their values are read.

An argument that was given always wins over a variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .errors import ConfigError, suggest

PREFIXES = ("LOOPWRIGHT_", "ACCELERATE_")
"""What stands before the names of `VARIABLES`; the first that is set wins."""

VARIABLES = {
    "CONFIG_DS_FIELDS": "what of DeepSpeed the launcher's file says, by names with commas between them",
    "CPU_AFFINITY": "whether each process is bound to cores of its own, or to those near its device",
    "DEBUG_MODE": "Accelerate's, kept as `debug` of the state: shapes are compared in any case",
    "BYPASS_DEVICE_MAP": "whether models whose parts are on several devices are trained as they are",
    "DEEPSPEED_CONFIG_FILE": "DeepSpeed's configuration of an `Accelerator`: a JSON file, or JSON in base64",
    "DEEPSPEED_MOE_LAYER_CLS_NAMES": "classes of modules that DeepSpeed gathers as a whole, with commas between them",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "where DeepSpeed keeps optimizer states: none, cpu or nvme",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "the folder for them on an NVMe device",
    "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "where DeepSpeed keeps weights: none, cpu or nvme",
    "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "the folder for them on an NVMe device",
    "DEEPSPEED_ZERO3_INIT": "whether DeepSpeed builds models in parts",
    "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "whether DeepSpeed gives whole weights in 16 bits",
    "DEEPSPEED_ZERO_STAGE": "what DeepSpeed spreads over the processes: 0 to 3",
    "DYNAMO_BACKEND": "what compiles the models of an `Accelerator`, such as inductor; no: nothing",
    "DYNAMO_MODE": "default, reduce-overhead or max-autotune: what it aims at",
    "DYNAMO_USE_DYNAMIC": "whether shapes are variables from the beginning",
    "DYNAMO_USE_FULLGRAPH": "whether a graph that would break is an error",
    "DYNAMO_USE_REGIONAL_COMPILATION": "whether the layers that a model repeats are compiled, once for all of them",
    "FP8_AMAX_COMPUTE_ALGO": "max or most_recent: which of the largest values Transformer Engine scales by",
    "FP8_AMAX_HISTORY_LEN": "how many of them it keeps",
    "FP8_BACKEND": "what computes in FP8: ao (torchao), te (Transformer Engine) or msamp (MS-AMP)",
    "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "whether FSDP gathers weights in FP8",
    "FP8_FORMAT": "HYBRID, E4M3 or E5M2: the numbers of Transformer Engine",
    "FP8_INTERVAL": "after how many steps it scales anew",
    "FP8_MARGIN": "how many powers of two its scaling leaves free",
    "FP8_OPT_LEVEL": "O1 or O2: what MS-AMP keeps in FP8",
    "FP8_OVERRIDE_DGRAD": "whether Transformer Engine computes gradients of inputs in high precision",
    "FP8_OVERRIDE_FPROP": "whether it computes outputs in high precision",
    "FP8_OVERRIDE_WGRAD": "whether it computes gradients of weights in high precision",
    "FP8_PAD_INNER_DIM": "whether torchao fills dimensions up to multiples of 16",
    "FP8_USE_AUTOCAST_DURING_EVAL": "whether Transformer Engine computes in FP8 in evaluations too",
    "FP8_USE_MXFP8_BLOCK_SCALING": "whether it scales blocks of 32 numbers",
    "GRADIENT_ACCUMULATION_STEPS": "micro-batches per optimizer step of an `Accelerator`",
    "GRADIENT_CLIPPING": "the largest norm of gradients under DeepSpeed",
    "LOG_LEVEL": "level of the loggers that `get_logger` gives, such as INFO",
    "MIXED_PRECISION": "no, bf16, fp16 or fp8: the number format of an `Accelerator`",
    "TORCH_DEVICE": "the device of an `Accelerator`, such as cuda:1",
    "USE_CPU": "whether an `Accelerator` stays on the CPU although there is an accelerator device",
    "USE_DEEPSPEED": "whether strategy='auto' is DeepSpeed, with the options of the variables for it",
    "USE_FSDP": "whether strategy='auto' is FSDP, with the options of `FSDP_VARIABLES`",
    "USE_PARALLELISM_CONFIG": "whether an `Accelerator` has the mesh that `PARALLELISM_VARIABLES` say",
    "USE_XLA": "whether strategy='auto' is XLA, on the device that torch_xla finds (`PJRT_DEVICE`)",
}
FSDP_VARIABLES = {
    "FSDP_ACTIVATION_CHECKPOINTING": "whether units compute their activations again in backward",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "whether the inputs of such units are kept on the host",
    "FSDP_AUTO_WRAP_POLICY": "which modules are units: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
    "FSDP_BACKWARD_PREFETCH": "version 1's word for what is gathered ahead in backward",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "whether transformers loads weights in one process of each machine alone",
    "FSDP_FORWARD_PREFETCH": "whether the next unit is gathered ahead in forward",
    "FSDP_IGNORED_MODULES": "a pattern of the names of modules that stay whole",
    "FSDP_MIN_NUM_PARAMS": "from how many parameters on SIZE_BASED_WRAP makes a module a unit",
    "FSDP_OFFLOAD_PARAMS": "whether parts are kept on the host",
    "FSDP_RESHARD_AFTER_FORWARD": "whether units are freed after their forward, or version 1's word",
    "FSDP_SHARDING_STRATEGY": "version 1's word for what is spread over which processes",
    "FSDP_STATE_DICT_TYPE": "in which form checkpoints are: SHARDED_STATE_DICT or FULL_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "version 1's: whether all processes get the weights of process 0",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "the classes of TRANSFORMER_BASED_WRAP, with commas between them",
    "FSDP_USE_ORIG_PARAMS": "version 1's: whether parameters keep their names",
    "FSDP_VERSION": "1 or 2: whose words the others are",
}
"""Accelerate's variables of FSDP, read without a prefix by a `FullyShardedDataParallelPlugin`."""
PARALLELISM_VARIABLES = {
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather or alltoall: how keys and values come to a process",
    "PARALLELISM_CONFIG_CP_SIZE": "parts of each sequence",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "copies of the model",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "parts of the weights",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "the length of whole sequences, where that is not variable",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "whether sequences have the length they come with",
    "PARALLELISM_CONFIG_SP_SIZE": "parts of each sequence, between which heads are exchanged",
    "PARALLELISM_CONFIG_TP_SIZE": "parts of the layers",
}
"""Accelerate's variables of meshes, read without a prefix by a `ParallelismConfig`."""
LAUNCHER_VARIABLES = {
    "GROUP_RANK": "the index of this machine (torchrun)",
    "LOCAL_RANK": "this process's index on its machine",
    "LOCAL_WORLD_SIZE": "the number of processes on this machine",
    "MASTER_ADDR": "the host where processes meet",
    "MASTER_PORT": "the port where processes meet",
    "MPI_LOCALNRANKS": "the number of processes on this machine (MPICH, Intel MPI)",
    "MPI_LOCALRANKID": "this process's index on its machine (MPICH, Intel MPI)",
    "OMPI_COMM_WORLD_LOCAL_RANK": "this process's index on its machine (OpenMPI)",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "the number of processes on this machine (OpenMPI)",
    "OMPI_COMM_WORLD_RANK": "this process's index (OpenMPI)",
    "OMPI_COMM_WORLD_SIZE": "the number of processes (OpenMPI)",
    "PMI_RANK": "this process's index (MPICH, Intel MPI)",
    "PMI_SIZE": "the number of processes (MPICH, Intel MPI)",
    "RANK": "this process's index",
    "SLURM_JOB_ID": "the job that is requeued (SLURM)",
    "SLURM_LOCALID": "this process's index on its machine (srun)",
    "SLURM_NODEID": "the index of this machine (srun)",
    "SLURM_PROCID": "this process's index (srun)",
    "SLURM_STEP_NUM_TASKS": "the number of processes (srun)",
    "SLURM_STEP_TASKS_PER_NODE": "the numbers of processes on each machine (srun)",
    "TORCHELASTIC_RESTART_COUNT": "how often the processes were started again after one failed (torchrun)",
    "TORCHELASTIC_RUN_ID": "the launch that they belong to (torchrun)",
    "WORLD_SIZE": "the number of processes",
}
"""Set by launchers, read without a prefix."""
KEY_PREFIX = "LOOPWRIGHT_"
"""What stands before the keys of a run's file, with `__` for each dot: `LOOPWRIGHT_TRAINER__MAX_EPOCHS` sets
`trainer.max_epochs`, `LOOPWRIGHT_DATA` all of `data`. The command line reads them (`loopwright/cli/sources.py`)."""

TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
FALSE_WORDS = ("0", "false", "f", "no", "n", "off")
"""What is true and what is false, in any case, wherever text is read: in variables, files and flags."""


def read_boolean(text: str) -> bool | None:
    """The claim that a text is, None where it is neither of the words for true and false."""
    word = text.strip().lower()
    return word in TRUE_WORDS if word in TRUE_WORDS + FALSE_WORDS else None


def variable_names() -> list[str]:
    """The full names of all variables that are read, those of a run's file apart."""
    own = [prefix + name for prefix in PREFIXES for name in VARIABLES]
    return [*own, *FSDP_VARIABLES, *PARALLELISM_VARIABLES, *LAUNCHER_VARIABLES]


def read_variable(name: str) -> tuple[str, str] | None:
    """The full name and the text of a variable of `VARIABLES`; None where it is unset or empty."""
    assert name in VARIABLES, name
    for prefix in PREFIXES:
        if text := os.environ.get(prefix + name, "").strip():
            return prefix + name, text
    return None


def read_text(name: str) -> str | None:
    """The text of a variable of `VARIABLES`, None where it is unset or empty."""
    found = read_variable(name)
    return None if found is None else found[1]


def read_flag(name: str) -> bool | None:
    """A variable of `VARIABLES` as a claim, None where it is unset or empty.

    Raises:
        ConfigError: its text is neither of the words for true and false.
    """
    found = read_variable(name)
    return None if found is None else _flag(*found)


def read_int(name: str) -> int | None:
    """A variable of `VARIABLES` as an integer, None where it is unset or empty.

    Raises:
        ConfigError: its text is no integer.
    """
    found = read_variable(name)
    return None if found is None else _int(*found)


def read_fsdp(name: str) -> str | None:
    """The text of a variable of `FSDP_VARIABLES`, None where it is unset or empty."""
    assert name in FSDP_VARIABLES, name
    return os.environ.get(name, "").strip() or None


def read_parallelism(name: str) -> str | None:
    """The text of a variable of `PARALLELISM_VARIABLES`, None where it is unset or empty."""
    assert name in PARALLELISM_VARIABLES, name
    return os.environ.get(name, "").strip() or None


def launched_as(name: str, default: int) -> int:
    """A number that a launcher has set, else the default.

    Raises:
        ConfigError: its text is no integer.
    """
    assert name in LAUNCHER_VARIABLES, name
    text = os.environ.get(name, "").strip()
    return _int(name, text) if text else default


def str_to_bool(value: str) -> int:
    """1 for y, yes, t, true, on and 1; 0 for n, no, f, false, off and 0, in any case.

    Raises:
        ConfigError: it is another word.
    """
    return int(_flag("value", value))


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable of your own as a claim; the default where it is unset.

    Raises:
        ConfigError: its text is neither of the words for true and false.
    """
    return _flag(key, os.environ[key]) if key in os.environ else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of a variable of your own; the default where it is unset."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables of your own that holds a number of at least 0; else the default.

    Raises:
        ConfigError: one is set to something else than an integer.
    """
    for key in env_keys:
        if key in os.environ and (value := _int(key, os.environ[key])) >= 0:
            return value
    return default


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """A context in which these variables are set, their names in upper case; put back afterwards, also on an error."""
    before = {key.upper(): os.environ.get(key.upper()) for key in variables}
    os.environ.update({key.upper(): str(value) for key, value in variables.items()})
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """A context in which no variable is set; put back afterwards, also on an error."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _flag(name: str, text: str) -> bool:
    word = text.strip().lower()
    value = read_boolean(word)
    if value is None:
        raise ConfigError(f"{name}={text!r} is neither true nor false. {suggest(word, TRUE_WORDS + FALSE_WORDS)}")
    return value


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not an integer. Set a whole number, or unset it.") from error
