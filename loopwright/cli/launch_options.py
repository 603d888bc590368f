"""The reader of a command line that holds options of `loopwright launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..distributed.environment import read_boolean
from ..distributed.errors import ConfigError, suggest
from .launch_tables import COMMON, DEEPSPEED, DYNAMO, FP8, FSDP, MESH, OPTIONS, SECTIONS, section_of

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
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fp8_amax_history_length": "fp8_amax_history_len",
    "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
}
"""Other spellings: short ones, torchrun's, those of launch files, and those of our own."""

_ABSENT_PREFIXES = {
    "use_megatron_lm": "Megatron-LM is not available.",
    "megatron_lm_": "Megatron-LM is not available.",
    "tpu_": "A pod is not reached from here: start the same command on each of its machines, with --tpu.",
    "no_tpu_cluster": "Leave it out: each machine of a pod runs this command itself, with --tpu.",
    "downcast_bf16": "It halves all numbers unseen. Use --mixed_precision bf16.",
    "main_training_function": "Leave it out: with --tpu too each process runs the script as it is.",
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
        if (section := section_of(name)) is not None:
            raise ConfigError(f"--{name} is for scripts. A file says it itself: {SECTIONS[section].in_files}.")
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
        if "true" in option.words and (claim := read_boolean(text)) is not None:
            text = str(claim)
        word = {word.lower(): word for word in option.words}.get(text.lower())
        if word is None:
            raise ConfigError(f"{where}: got {value!r}. {suggest(text, option.words)}")
        return option.kind(word)
    if option.parts:
        return _convert_parts(text, len(option.parts), where)
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
    lines = []
    tables = {"": COMMON, "FSDP": FSDP, "DeepSpeed": DEEPSPEED, "a mesh": MESH, "FP8": FP8, "compiling": DYNAMO}
    for title, table in tables.items():
        shown = {name: option for name, option in table.items() if is_for_scripts or not option.is_for_scripts}
        width = 4 + max((len(name) for name in shown), default=0)
        lines += [f"\n{title}:"] if title and shown else []
        lines += [f"  {'--' + name:<{max(width, 32)}}{option.help}" for name, option in shown.items()]
    return "\n".join(lines)


def _split(argument: str) -> tuple[str, bool, str]:
    """Name, whether there is a value behind `=`, and that value."""
    spelling, equals, value = argument.lstrip("-").partition("=")
    name = spelling.replace("-", "_")
    is_short = not argument.startswith("--")
    return (ALIASES.get(name, name) if len(name) == 1 or not is_short else f"-{name}"), bool(equals), value


def _take(name: str, value: str | None, rest: list[str]) -> Any:
    """An option's value: from behind `=`, or the next argument; a switch is true by itself."""
    if OPTIONS[name].kind is bool and OPTIONS[name].is_switch:
        return True if value is None else convert(name, value, f"--{name}")
    if value is None:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"--{name} has no value. {OPTIONS[name].help[0].upper()}{OPTIONS[name].help[1:]}.")
        value = rest.pop(0)
    return convert(name, value, f"--{name}")


def _convert_parts(text: str, count: int, where: str) -> str:
    claims = [read_boolean(part.strip()) for part in text.strip("()[]").split(",")]
    if len(claims) != count or None in claims:
        raise ConfigError(f"{where}: got {text!r}. Expected {count} words, true or false, with commas between them.")
    return ",".join(str(claim).lower() for claim in claims)


def _unknown(spelling: str, name: str) -> str:
    if (remedy := absent(name)) is not None:
        return f"{spelling}: {remedy}"
    near = suggest(name.lstrip("-").lower(), [*OPTIONS, *ALIASES], is_listed=False)
    return (
        f"{spelling} is not known. {near} `loopwright launch --help` lists the options; those of the script stand "
        "behind its name."
    ).replace("  ", " ")
