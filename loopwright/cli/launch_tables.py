"""The options of `loopwright launch`, in tables: their kinds, and the variables by which they reach the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..distributed.environment import PREFIXES
from ..distributed.parallelism import ROTATIONS
from ..strategies.dynamo_plugin import BACKENDS, MODES
from ..strategies.fp8_words import AMAX_ALGORITHMS, FORMATS, OPT_LEVELS
from ..strategies.fp8_words import BACKENDS as FP8_BACKENDS
from ..strategies.fsdp_words import BACKWARD_PREFETCHES, SHARDING_STRATEGIES, STATE_DICT_TYPES, WRAP_POLICIES

OURS, ACCELERATES = PREFIXES


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    kind: type
    """bool, int, float or str."""
    help: str
    """What it does, for `--help`."""
    words: tuple[str, ...] = ()
    """The words that are accepted, in any case; none: any text."""
    is_for_scripts: bool = False
    """Whether it means something for `launch` alone, and not for the commands that run a file."""
    variable: str = ""
    """The variable by which it reaches the script; none: it is for the launcher."""
    parts: tuple[str, ...] = ()
    """In place of `variable`: the variables for its parts, which are true or false, with commas between them."""
    is_switch: bool = True
    """Whether a bool is true by itself; False: its value follows it."""


def _claim(variable: str, help: str) -> Option:
    return Option(bool, help, is_for_scripts=True, variable=variable, is_switch=False)


def _text(variable: str, help: str, words: tuple[str, ...] = ()) -> Option:
    return Option(str, help, words, is_for_scripts=True, variable=variable)


def _number(variable: str, help: str, words: tuple[str, ...] = (), kind: type = int) -> Option:
    return Option(kind, help, words, is_for_scripts=True, variable=variable)


def _numbered(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words, and their numbers from 1 on, by which torch knows them as well."""
    return (*words, *(str(index + 1) for index in range(len(words))))


COMMON: Mapping[str, Option] = {
    "config_file": Option(str, "a launch file, YAML or JSON, in place of the default one"),
    "num_processes": Option(int, "processes on all machines together; default: one per accelerator device"),
    "num_machines": Option(int, "machines that take part"),
    "machine_rank": Option(int, "this machine's index"),
    "main_process_ip": Option(str, "the address of machine 0"),
    "main_process_port": Option(int, "the port where all meet; 0: a free one"),
    "same_network": Option(bool, "accepted, and makes no difference here"),
    "cpu": Option(bool, "stay on the CPU", variable=f"{OURS}USE_CPU"),
    "multi_gpu": Option(bool, "several processes, each on an accelerator device, with a copy of the model"),
    "tpu": Option(bool, "an Accelerator uses torch_xla, on TPUs or what PJRT_DEVICE says", (), True, f"{OURS}USE_XLA"),
    "gpu_ids": Option(str, "the devices that are used, such as 0,2; or all"),
    "mixed_precision": Option(
        str, "the number format of an Accelerator", ("no", "bf16", "fp16", "fp8"), True, f"{OURS}MIXED_PRECISION"
    ),
    "gradient_accumulation_steps": Option(
        int,
        "micro-batches per step of an Accelerator",
        is_for_scripts=True,
        variable=f"{OURS}GRADIENT_ACCUMULATION_STEPS",
    ),
    "num_cpu_threads_per_process": Option(
        int, "OMP_NUM_THREADS; default: the cores, shared evenly", variable="OMP_NUM_THREADS"
    ),
    "enable_cpu_affinity": Option(
        bool, "bind each process to cores of its own, or to those near its device", variable=f"{OURS}CPU_AFFINITY"
    ),
    "debug": Option(
        bool,
        "show torch's reports on the launch, and set `debug` of an AcceleratorState",
        variable=f"{OURS}DEBUG_MODE",
    ),
    "quiet": Option(bool, "do not say which process failed first"),
    "module": Option(bool, "the script is a module's name, as in python -m", is_for_scripts=True),
    "no_python": Option(bool, "the script is a program of its own", is_for_scripts=True),
    "rdzv_backend": Option(str, "how launchers meet: static, c10d, ..."),
    "rdzv_conf": Option(str, "options of that, such as timeout=60,read_timeout=60"),
    "max_restarts": Option(int, "how often all are started again after one failed"),
    "monitor_interval": Option(float, "seconds between two looks at the processes"),
    "role": Option(str, "torch's name for these processes"),
    "tee": Option(str, "also into files: 0 nothing, 1 output, 2 errors, 3 both"),
    "log_dir": Option(str, "the folder of these files"),
}
FSDP: Mapping[str, Option] = {
    "use_fsdp": Option(bool, "an Accelerator spreads its model over the processes", (), True, f"{ACCELERATES}USE_FSDP"),
    "fsdp_version": _number("FSDP_VERSION", "whose words the others are; both run torch's fully_shard", ("1", "2")),
    "fsdp_reshard_after_forward": _text(
        "FSDP_RESHARD_AFTER_FORWARD",
        "free a unit's weights between its forward and its backward, or a word of version 1",
        ("true", "false", *_numbered(SHARDING_STRATEGIES)),
    ),
    "fsdp_sharding_strategy": _text(
        "FSDP_SHARDING_STRATEGY", "version 1's word for that", _numbered(SHARDING_STRATEGIES)
    ),
    "fsdp_auto_wrap_policy": _text("FSDP_AUTO_WRAP_POLICY", "which modules are units", WRAP_POLICIES),
    "fsdp_transformer_layer_cls_to_wrap": _text(
        "FSDP_TRANSFORMER_CLS_TO_WRAP", "the classes of TRANSFORMER_BASED_WRAP, with commas between them"
    ),
    "fsdp_min_num_params": _number("FSDP_MIN_NUM_PARAMS", "how many parameters make a unit with SIZE_BASED_WRAP"),
    "fsdp_offload_params": _claim("FSDP_OFFLOAD_PARAMS", "keep the parts on the host"),
    "fsdp_state_dict_type": _text("FSDP_STATE_DICT_TYPE", "in which form checkpoints are", _numbered(STATE_DICT_TYPES)),
    "fsdp_activation_checkpointing": _claim("FSDP_ACTIVATION_CHECKPOINTING", "compute activations twice, for memory"),
    "fsdp_activation_checkpointing_offload": _claim(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "and keep the inputs of units on the host"
    ),
    "fsdp_cpu_ram_efficient_loading": _claim(
        "FSDP_CPU_RAM_EFFICIENT_LOADING", "transformers loads weights in one process of each machine alone"
    ),
    "fsdp_ignored_modules": _text("FSDP_IGNORED_MODULES", "a pattern of the names of modules that stay whole"),
    "fsdp_forward_prefetch": _claim("FSDP_FORWARD_PREFETCH", "gather the next unit ahead in forward"),
    "fsdp_backward_prefetch": _text(
        "FSDP_BACKWARD_PREFETCH", "version 1's; always done", _numbered(BACKWARD_PREFETCHES)
    ),
    "fsdp_sync_module_states": _claim("FSDP_SYNC_MODULE_STATES", "version 1's; always so"),
    "fsdp_use_orig_params": _claim("FSDP_USE_ORIG_PARAMS", "version 1's; always so"),
}
_ZERO, _PLACES = f"{ACCELERATES}DEEPSPEED_", ("none", "cpu", "nvme")
DEEPSPEED: Mapping[str, Option] = {
    "use_deepspeed": Option(bool, "an Accelerator trains with DeepSpeed", (), True, f"{ACCELERATES}USE_DEEPSPEED"),
    "deepspeed_config_file": _text(f"{_ZERO}CONFIG_FILE", "a file of DeepSpeed's options, JSON"),
    "zero_stage": _number(f"{_ZERO}ZERO_STAGE", "what is spread over the processes", ("0", "1", "2", "3")),
    "offload_optimizer_device": _text(f"{_ZERO}OFFLOAD_OPTIMIZER_DEVICE", "where optimizer states are kept", _PLACES),
    "offload_optimizer_nvme_path": _text(f"{_ZERO}OFFLOAD_OPTIMIZER_NVME_PATH", "their folder, for nvme"),
    "offload_param_device": _text(f"{_ZERO}OFFLOAD_PARAM_DEVICE", "where weights are kept, with stage 3", _PLACES),
    "offload_param_nvme_path": _text(f"{_ZERO}OFFLOAD_PARAM_NVME_PATH", "their folder, for nvme"),
    "gradient_clipping": _number(f"{ACCELERATES}GRADIENT_CLIPPING", "the largest norm of gradients", kind=float),
    "zero3_init_flag": _claim(f"{_ZERO}ZERO3_INIT", "build models in parts, with stage 3"),
    "zero3_save_16bit_model": _claim(f"{_ZERO}ZERO3_SAVE_16BIT_MODEL", "save 16-bit weights, with stage 3"),
    "deepspeed_moe_layer_cls_names": _text(
        f"{_ZERO}MOE_LAYER_CLS_NAMES", "classes of mixtures of experts, with commas between them"
    ),
    "deepspeed_multinode_launcher": Option(
        str,
        "what starts the processes of several machines; standard: this command on each",
        ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"),
        True,
    ),
    "deepspeed_hostfile": Option(str, "the file of the machines and their slots", is_for_scripts=True),
    "deepspeed_inclusion_filter": Option(str, "which of them are used: host1@host2:0,2", is_for_scripts=True),
    "deepspeed_exclusion_filter": Option(str, "which of them are not used", is_for_scripts=True),
}
_MESH = "PARALLELISM_CONFIG_"
MESH: Mapping[str, Option] = {
    "use_parallelism_config": Option(
        bool, "an Accelerator has a mesh of processes", (), True, f"{ACCELERATES}USE_PARALLELISM_CONFIG"
    ),
    "parallelism_config_dp_replicate_size": _number(f"{_MESH}DP_REPLICATE_SIZE", "groups with a copy each"),
    "parallelism_config_dp_shard_size": _number(f"{_MESH}DP_SHARD_SIZE", "processes with a part of the model each"),
    "parallelism_config_tp_size": _number(f"{_MESH}TP_SIZE", "processes with a part of each layer"),
    "parallelism_config_cp_size": _number(f"{_MESH}CP_SIZE", "processes with a part of each sequence, by torch"),
    "parallelism_config_cp_backend": _text(f"{_MESH}CP_BACKEND", "who does that", ("torch",)),
    "parallelism_config_cp_comm_strategy": _text(f"{_MESH}CP_COMM_STRATEGY", "how", ROTATIONS),
    "parallelism_config_sp_size": _number(f"{_MESH}SP_SIZE", "processes with a part of each sequence, by heads"),
    "parallelism_config_sp_backend": _text(f"{_MESH}SP_BACKEND", "who does that", ("deepspeed",)),
    "parallelism_config_sp_seq_length": _number(f"{_MESH}SP_SEQ_LENGTH", "the length of whole sequences"),
    "parallelism_config_sp_seq_length_is_variable": _claim(f"{_MESH}SP_SEQ_LENGTH_IS_VARIABLE", "whether it varies"),
    "parallelism_config_sp_attn_implementation": _text(f"{_MESH}SP_ATTN_IMPLEMENTATION", "transformers' word"),
}
_FP8 = f"{ACCELERATES}FP8_"
FP8: Mapping[str, Option] = {
    "fp8_backend": _text(f"{_FP8}BACKEND", "torchao, Transformer Engine or MS-AMP", FP8_BACKENDS),
    "fp8_enable_fsdp_float8_all_gather": _claim(f"{_FP8}ENABLE_FSDP_FLOAT8_ALL_GATHER", "ao: gather weights in FP8"),
    "fp8_pad_inner_dim": _claim(f"{_FP8}PAD_INNER_DIM", "ao: fill dimensions up to multiples of 16"),
    "fp8_use_autocast_during_eval": Option(
        bool, "te: compute in FP8 in evaluations too", (), True, f"{_FP8}USE_AUTOCAST_DURING_EVAL"
    ),
    "fp8_margin": _number(f"{_FP8}MARGIN", "te: powers of two that its scaling leaves free"),
    "fp8_interval": _number(f"{_FP8}INTERVAL", "te: after how many steps it scales anew"),
    "fp8_format": _text(f"{_FP8}FORMAT", "te: the numbers", FORMATS),
    "fp8_amax_history_len": _number(f"{_FP8}AMAX_HISTORY_LEN", "te: how many of the largest values it keeps"),
    "fp8_amax_compute_algo": _text(f"{_FP8}AMAX_COMPUTE_ALGO", "te: which of them it scales by", AMAX_ALGORITHMS),
    "fp8_override_linear_precision": Option(
        str,
        "te: whether outputs, gradients of inputs and of weights are in high precision, such as true,false,false",
        is_for_scripts=True,
        parts=tuple(f"{_FP8}OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD")),
    ),
    "fp8_opt_level": _text(f"{_FP8}OPT_LEVEL", "msamp: what it keeps in FP8", OPT_LEVELS),
}
_DYNAMO = f"{ACCELERATES}DYNAMO_"
DYNAMO: Mapping[str, Option] = {
    "dynamo_backend": _text(f"{_DYNAMO}BACKEND", "what compiles the models of an Accelerator", BACKENDS),
    "dynamo_mode": _text(f"{_DYNAMO}MODE", "what it aims at", MODES),
    "dynamo_use_fullgraph": Option(bool, "a graph that breaks is an error", (), True, f"{_DYNAMO}USE_FULLGRAPH"),
    "dynamo_use_dynamic": Option(bool, "shapes are variables from the beginning", (), True, f"{_DYNAMO}USE_DYNAMIC"),
    "dynamo_use_regional_compilation": Option(
        bool, "compile repeated layers, once for all of them", (), True, f"{_DYNAMO}USE_REGIONAL_COMPILATION"
    ),
}


class Section(NamedTuple):
    """A section of a launch file."""

    table: Mapping[str, Option]
    """Its options."""
    prefix: str
    """How their names begin; its keys may leave that out."""
    switch: str
    """The option that switches it on."""
    word: str = ""
    """With which word; none: any but "no", or the option is a bool."""
    in_files: str = "--trainer.strategy=fsdp"
    """What stands for it in the file of a run."""

    @property
    def takes_word(self) -> bool:
        """Whether its switch has a word; then it does not say how the model is spread, and goes with any strategy."""
        return OPTIONS[self.switch].kind is str

    def shown(self) -> str:
        """The switch as it stands on a command line."""
        return f"--{self.switch} {self.word}".strip()

    def is_on(self, options: Mapping[str, object]) -> bool:
        """Whether options switch it on."""
        value = options.get(self.switch)
        return value == self.word if self.word else value not in (None, False, "no")


SECTIONS: Mapping[str, Section] = {
    "fsdp_config": Section(FSDP, "fsdp_", "use_fsdp"),
    "deepspeed_config": Section(DEEPSPEED, "deepspeed_", "use_deepspeed"),
    "parallelism_config": Section(MESH, "parallelism_config_", "use_parallelism_config"),
    "fp8_config": Section(FP8, "fp8_", "mixed_precision", "fp8", "--trainer.precision=fp8"),
    "dynamo_config": Section(DYNAMO, "dynamo_", "dynamo_backend", "", "--trainer.compile=true"),
}
"""The sections of a launch file."""
OPTIONS: Mapping[str, Option] = {**COMMON, **FSDP, **DEEPSPEED, **MESH, **FP8, **DYNAMO}
"""All options by name."""


def section_of(name: str) -> str | None:
    """The section that an option belongs to, None where it is for all."""
    return next((section for section, found in SECTIONS.items() if name in found.table), None)


def variables_of(options: Mapping[str, object]) -> dict[str, str]:
    """The variables by which options reach the script, with their texts."""
    found = {}
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is not None and option.variable:
            found[option.variable] = str(value).lower() if option.kind is bool else str(value)
        if option is not None and option.parts:
            found |= dict(zip(option.parts, str(value).split(","), strict=True))
    return found
