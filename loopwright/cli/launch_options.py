"""The options of `loopwright launch`: one table, and the reader of a command line that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..distributed.environment import read_boolean
from ..distributed.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    kind: type
    """bool: a switch, which takes no value; int, float or str."""
    help: str
    """What it does, for `--help`."""
    words: tuple[str, ...] = ()
    """The words that are accepted; none: any text."""
    is_for_scripts: bool = False
    """Whether it means something for `launch` alone, and not for the commands that run a file."""


OPTIONS: Mapping[str, Option] = {
    "config_file": Option(str, "a launch file, YAML or JSON, in place of the default one"),
    "num_processes": Option(int, "processes on all machines together; default: one per accelerator device"),
    "num_machines": Option(int, "machines that take part"),
    "machine_rank": Option(int, "this machine's index"),
    "main_process_ip": Option(str, "the address of machine 0"),
    "main_process_port": Option(int, "the port where all meet; 0: a free one"),
    "same_network": Option(bool, "accepted, and makes no difference here"),
    "cpu": Option(bool, "stay on the CPU"),
    "multi_gpu": Option(bool, "several processes, each on an accelerator device"),
    "gpu_ids": Option(str, "the devices that are used, such as 0,2; or all"),
    "mixed_precision": Option(str, "the number format of an Accelerator", ("no", "bf16", "fp16"), True),
    "gradient_accumulation_steps": Option(int, "micro-batches per step of an Accelerator", is_for_scripts=True),
    "num_cpu_threads_per_process": Option(int, "OMP_NUM_THREADS; default: the cores, shared evenly"),
    "enable_cpu_affinity": Option(bool, "bind each process to cores of its own, or to those near its device"),
    "debug": Option(bool, "show torch's reports on the launch, and set `debug` of an AcceleratorState"),
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
ALIASES = {
    "m": "module",
    "t": "tee",
    "nproc_per_node": "num_processes",
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
    "accumulate": "gradient_accumulation_steps",
    "use_cpu": "cpu",
}
"""Other spellings: short ones, torchrun's, and those of our own."""

_COMPILE = "Compile the model in the script: torch.compile(model, backend=...), or Trainer(compile=True)."
_ABSENT_PREFIXES = {
    "use_fsdp": "FSDP is not available in this version.",
    "fsdp_": "FSDP is not available in this version.",
    "use_deepspeed": "DeepSpeed is not available in this version.",
    "deepspeed_": "DeepSpeed is not available in this version.",
    "zero": "DeepSpeed is not available in this version.",
    "offload_": "DeepSpeed is not available in this version.",
    "gradient_clipping": "Clip in the script: accelerator.clip_grad_norm_, or Trainer(clip_norm=...).",
    "use_megatron_lm": "Megatron-LM is not available.",
    "megatron_lm_": "Megatron-LM is not available.",
    "use_parallelism_config": "Meshes of several kinds of parallelism are not available in this version.",
    "parallelism_config_": "Meshes of several kinds of parallelism are not available in this version.",
    "fp8_": "fp8 is not available in this version.",
    "dynamo_": _COMPILE,
    "tpu": "TPUs are not available in this version.",
    "no_tpu_cluster": "TPUs are not available in this version.",
    "downcast_bf16": "TPUs are not available in this version.",
    "main_training_function": "TPUs are not available in this version.",
    "aws_": "SageMaker is not available.",
    "mpirun_hostfile": "Start with mpirun itself: mpirun -n 4 python script.py; the script finds its place.",
}
"""Accelerate's options that are not there, by how they begin, and what to do."""


@dataclass(slots=True)
class Given:
    """What a command line gives."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values by the names of `OPTIONS`."""
    rest: list[str] = field(default_factory=list)
    """What is not for the launcher."""
    asks_help: bool = False
    """Whether the help is asked for."""


def read_launch(arguments: Sequence[str]) -> Given:
    """Read `[options] script.py args ...`: what follows the script belongs to it and is not looked at.

    Raises:
        ConfigError: an option is unknown, lacks its value, or has one of another kind.
    """
    given, rest = Given(), list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        if argument in ("-h", "--help"):
            given.asks_help = True
            continue
        name, has_value, value = _split(argument)
        if name not in OPTIONS:
            raise ConfigError(_unknown(argument.partition("=")[0], name))
        given.options[name] = _take(name, value if has_value else None, rest)
    given.rest = rest
    return given


def extract_launch(arguments: Sequence[str]) -> Given:
    """Take the launching options out of a command line of a command that runs a file; the rest is left to it.

    Raises:
        ConfigError: an option lacks its value, or has one of another kind.
    """
    given, rest = Given(), list(arguments)
    while rest:
        argument = rest.pop(0)
        name, has_value, value = _split(argument) if argument.startswith("--") else ("", False, "")
        if name not in OPTIONS or OPTIONS[name].is_for_scripts:
            given.rest.append(argument)
            continue
        given.options[name] = _take(name, value if has_value else None, rest)
    return given


def convert(name: str, value: object, where: str) -> Any:
    """A value as its option takes it.

    Args:
        name: of `OPTIONS`.
        value: a text, or what a file holds.
        where: how to call the place in an error, such as `"--num_processes"`.
    Raises:
        ConfigError: it is of another kind, or none of the words.
    """
    option = OPTIONS[name]
    text = str(value).strip()
    if option.kind is bool:
        claim = read_boolean(text)
        if claim is None:
            raise ConfigError(f"{where}: got {value!r}. Expected true or false.")
        return claim
    if option.words:
        if text.lower() == "false" and "no" in option.words:
            text = "no"  # YAML's reading of the word
        if text.lower() not in option.words:
            raise ConfigError(f"{where}: got {value!r}. {suggest(text, option.words)}{_remedy(text)}")
        return text.lower()
    if option.kind is str:
        return text
    try:
        return option.kind(text)
    except ValueError as error:
        wanted = "a whole number" if option.kind is int else "a number"
        raise ConfigError(f"{where}: got {value!r}. Expected {wanted}.") from error


def absent(name: str) -> str | None:
    """What to do in place of an option of Accelerate that is not there; None where it is no such option."""
    return next((text for prefix, text in _ABSENT_PREFIXES.items() if name.startswith(prefix)), None)


def options_help(*, is_for_scripts: bool) -> str:
    """The lines of the help, one per option."""
    shown = {name: option for name, option in OPTIONS.items() if is_for_scripts or not option.is_for_scripts}
    return "\n".join(f"  {'--' + name:<32}{option.help}" for name, option in shown.items())


def _split(argument: str) -> tuple[str, bool, str]:
    """Name, whether there is a value behind `=`, and that value."""
    spelling, equals, value = argument.lstrip("-").partition("=")
    name = spelling.replace("-", "_")
    is_short = not argument.startswith("--")
    return (ALIASES.get(name, name) if len(name) == 1 or not is_short else f"-{name}"), bool(equals), value


def _take(name: str, value: str | None, rest: list[str]) -> Any:
    """An option's value: from behind `=`, or the next argument; a switch is true by itself."""
    if OPTIONS[name].kind is bool:
        return True if value is None else convert(name, value, f"--{name}")
    if value is None:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"--{name} has no value. {OPTIONS[name].help[0].upper()}{OPTIONS[name].help[1:]}.")
        value = rest.pop(0)
    return convert(name, value, f"--{name}")


def _unknown(spelling: str, name: str) -> str:
    if (remedy := absent(name)) is not None:
        return f"{spelling}: {remedy}"
    near = suggest(name.lstrip("-").lower(), [*OPTIONS, *ALIASES], is_listed=False)
    return (
        f"{spelling} is not known. {near} `loopwright launch --help` lists the options; those of the script stand "
        "behind its name."
    ).replace("  ", " ")


def _remedy(word: str) -> str:
    return " fp8 is not available in this version." if word.lower() == "fp8" else ""
