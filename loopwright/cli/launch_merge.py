"""What a launch is told in all: the options of the command line, over variables that are set, over the launch file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..distributed.environment import PREFIXES, read_boolean
from ..distributed.errors import ConfigError
from .launch_config import LaunchFile, find_default, read_launch_file
from .launch_tables import OPTIONS, SECTIONS, section_of

_KINDS = ("multi_gpu", "use_fsdp", "use_deepspeed", "tpu")
"""Options that say how a model is spread over the processes; one of them at most."""


def merged_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command line, over those of the launch file. What is ignored is said on stderr.

    Raises:
        ConfigError: the file can't be used or asks for what is not there, or options contradict each other.
    """
    file = _read_file(given.get("config_file"))
    _check_type(file, given)
    if file.unused:
        note(f"{file.path}: {', '.join(file.unused)} is not used here.")
    kinds = [name for name in _KINDS if given.get(name)]
    if len(kinds) > 1:
        raise ConfigError(f"--{' and --'.join(kinds)} exclude each other. Leave all but one out.")
    sections = _sections(file, given, kinds)
    options = _options_of(file, sections, given) | dict(given) | _switches(sections)
    options |= {name: False for name in _KINDS[1:] if kinds and name not in kinds and is_set(name)}
    options |= _devices_for(file, options, kinds)
    if "deepspeed_config" in sections and file.path is not None:
        options["deepspeed_fields"] = _deepspeed_fields(file, given)
    _check_unused_sections(file, sections)
    _check_conflicts(options)
    return options


def _options_of(file: LaunchFile, sections: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says, where neither a variable nor the command line's kind of devices wins over it."""
    options = {**file.options}
    for section in sections:
        options |= file.sections.get(section, {})
    if given.get("multi_gpu") or given.get("tpu"):
        options.pop("cpu", None)
    return {name: value for name, value in options.items() if not is_set(name)}


def _devices_for(file: LaunchFile, options: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The options that follow from the devices which a file is for."""
    if file.is_for_xla and not (kinds or options.get("cpu") or is_set("tpu")):
        return {"tpu": True}
    is_for_devices = file.distributed_type not in ("NO", "MULTI_CPU") and "cpu" not in options
    return {"wants_devices": options.get("wants_devices", True)} if is_for_devices and not options.get("tpu") else {}


def is_set(name: str) -> bool:
    """Whether the environment sets an option, which then wins over the file."""
    return any(text.strip() for text in _texts(name))


def note(text: str) -> None:
    """Say on stderr what a user would not expect."""
    print(f"loopwright: {text}", file=sys.stderr)


def _read_file(given: str | None) -> LaunchFile:
    if given is not None:
        return read_launch_file(Path(given).expanduser())
    path = find_default()
    if path is None:
        return LaunchFile()
    note(f"settings from {path}.")
    return read_launch_file(path)


def _check_type(file: LaunchFile, given: Mapping[str, Any]) -> None:
    """Refuse a file for a strategy that is not there, unless the command line says to go on without it."""
    remedy = file.absent_type()
    if remedy is None:
        return
    if given.get("cpu") or any(given.get(name) for name in _KINDS):
        note(f"{file.path}: distributed_type={file.distributed_type} is not used, because of the command line.")
        return
    raise ConfigError(
        f"{file.path}: distributed_type={file.distributed_type!r}: {remedy}. --multi_gpu, or --cpu, runs the script "
        "with DDP in place of it."
    )


def _sections(file: LaunchFile, given: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """The sections that count: those that the command line switches on, else those of the file.

    Raises:
        ConfigError: an option belongs to a section that is not switched on.
    """
    found = [name for name in SECTIONS if _is_on(name, file, given, kinds)]
    for name in given:
        section = section_of(name)
        if section is not None and section not in found and name != SECTIONS[section].switch:
            shown = SECTIONS[section].shown()
            raise ConfigError(f"--{name} belongs to {shown}, which is not given. Give both, or none.")
    return found


def _switches(names: Iterable[str]) -> dict[str, Any]:
    """What switches sections on, where that is no word of the user's own."""
    sections = [SECTIONS[name] for name in names]
    return {each.switch: each.word or True for each in sections if each.word or not each.takes_word}


def _is_on(name: str, file: LaunchFile, given: Mapping[str, Any], kinds: Sequence[str]) -> bool:
    """Whether a section counts: the command line says it, else a variable, else the file."""
    section = SECTIONS[name]
    if section.switch in given:
        return section.is_on(given)
    if kinds and not section.takes_word and (name != "parallelism_config" or "multi_gpu" in kinds):
        return False  # the command line has said how the model is spread
    texts = [text.strip().lower() for text in _texts(section.switch) if text.strip()]
    if section.takes_word and texts:
        return section.is_on({section.switch: texts[0]})
    return any(map(read_boolean, texts)) or name in file.chosen


def _texts(name: str) -> list[str]:
    """What the environment sets an option to, by each of the names that its variables have."""
    found = []
    for variable in (OPTIONS[name].variable, *OPTIONS[name].parts):
        bare = next((variable.removeprefix(prefix) for prefix in PREFIXES if variable.startswith(prefix)), None)
        names = [variable] if bare is None else [prefix + bare for prefix in PREFIXES]
        found += [os.environ[each] for each in names if each in os.environ]
    return found


def _deepspeed_fields(file: LaunchFile, given: Mapping[str, Any]) -> list[str]:
    """What the file says of DeepSpeed, which must not be said in DeepSpeed's own file as well."""
    fields = list(file.sections.get("deepspeed_config", {}))
    fields += ["gradient_accumulation_steps"] if "gradient_accumulation_steps" in file.options else []
    return fields + (["mixed_precision"] if "mixed_precision" in file.options.keys() - given.keys() else [])


def _check_unused_sections(file: LaunchFile, sections: Iterable[str]) -> None:
    """Say which sections of the file don't count. Accelerate's files hold those of other types as well."""
    unused = [section for section in file.sections if section not in sections]
    if unused:
        switches = ", ".join(SECTIONS[section].shown() for section in unused)
        note(f"{file.path}: {', '.join(unused)} is not used: it belongs to {switches}.")


def _check_conflicts(options: Mapping[str, Any]) -> None:
    if options.get("cpu") and options.get("multi_gpu"):
        raise ConfigError("--cpu and --multi_gpu exclude each other. Leave one out.")
    if options.get("cpu") and options.get("tpu"):
        raise ConfigError("--cpu and --tpu exclude each other. PJRT_DEVICE=CPU runs torch_xla on the CPU.")
    if options.get("module") and options.get("no_python"):
        raise ConfigError("--module and --no_python exclude each other: a module is run by Python. Leave one out.")
    for name in ("gradient_accumulation_steps", "num_cpu_threads_per_process"):
        if options.get(name, 1) < 1:
            raise ConfigError(f"{name}={options[name]}. Expected an integer >= 1.")
    if options.get("fsdp_cpu_ram_efficient_loading") and options.get("fsdp_sync_module_states") is False:
        raise ConfigError(
            "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states, which is false: other processes would have "
            "no weights. Leave that out."
        )
    if options.get("use_parallelism_config") and not (options.get("use_fsdp") or options.get("use_deepspeed")):
        raise ConfigError("--use_parallelism_config needs --use_fsdp, whose processes form the mesh. Give both.")
    if options.get("deepspeed_inclusion_filter") and options.get("deepspeed_exclusion_filter"):
        raise ConfigError("deepspeed_inclusion_filter and deepspeed_exclusion_filter exclude each other. Give one.")
