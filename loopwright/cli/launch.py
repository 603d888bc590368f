"""`loopwright launch`: run a script in several processes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.errors import ConfigError, suggest
from .deepspeed_machines import is_for_deepspeed, on_machines, run_deepspeed
from .launch_config import type_word
from .launch_merge import is_set, merged_options, note
from .launch_options import options_help, read_launch
from .launch_tables import OPTIONS, variables_of

if TYPE_CHECKING:
    from ..distributed.launching import LaunchSettings

USAGE = """\
usage: loopwright launch [options] script.py [arguments of the script]
       loopwright launch [options] --module package.module [arguments]

Runs the script in --num_processes processes, which find each other. An option wins over a variable that is set, a
variable over the launch file, which `loopwright config` writes. `-` and `_` are the same in names.

options:
"""
VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
}
"""By kind of device, the variable that says which of them a process sees."""


def run_launch(arguments: Sequence[str]) -> int:
    """Run a script in several processes, and return its exit code: that of the process which failed first.

    Raises:
        ConfigError: an option, the launch file, the script or the port can't be used.
        LaunchError: the processes could not be started.
    """
    given = read_launch(arguments)
    if given.asks_help:
        print(f"{USAGE}{options_help(is_for_scripts=True)}")
        return 0
    options = on_machines(merged_options(given.options))
    command = _command(given.rest, options)
    if is_for_deepspeed(options):
        return run_deepspeed(options, given.rest, _variables(options))
    return run_processes("launch", options, command)


def run_processes(command_name: str, options: Mapping[str, Any], command: Sequence[str]) -> int:
    """Run a command in the processes that the options ask for, and return the exit code.

    Args:
        command_name: of Loopwright, for the line that says which process failed.
        options: as `merged_options` gives them.
        command: the program with its arguments.
    """
    from ..distributed.launching import run_command

    settings = settings_of(options)
    print(end="", flush=True)  # before what the processes print
    outcome = run_command(settings, command)
    if outcome.text and not options.get("quiet"):
        print(f"loopwright {command_name}: {outcome.text}", file=sys.stderr)
    return outcome.exit_code


def settings_of(options: Mapping[str, Any]) -> LaunchSettings:
    """What the launcher needs to know, from merged options.

    Raises:
        ConfigError: they contradict each other or this machine.
    """
    from ..distributed.launching import LaunchSettings

    number, names = _devices(options)
    num_machines = options.get("num_machines", 1)
    num_processes = options.get("num_processes", max(1, number) * num_machines)
    _check_count(options, num_processes, number)
    names_of_settings = (
        "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "max_restarts", "monitor_interval",
        "role", "tee", "log_dir",
    )  # fmt: skip
    return LaunchSettings(
        num_processes=num_processes,
        num_machines=num_machines,
        rdzv_conf=_pairs(options.get("rdzv_conf", "")),
        environment={**_variables(options), **names},
        shows_reports=bool(options.get("debug")),
        **{name: options[name] for name in names_of_settings if name in options},
    )


def _devices(options: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    """How many devices the processes of this machine may use, and the variable that says which; 0 on the CPU.

    Raises:
        ConfigError: devices are asked for that this machine has not.
    """
    if options.get("tpu"):
        return 0, {}  # torch_xla gives each process its device
    if options.get("cpu") or (is_set("cpu") and not options.get("multi_gpu")):
        return 0, {}
    import torch

    chosen = options.get("gpu_ids", "all")
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator()) is not None:
        return (torch.accelerator.device_count(), {}) if chosen == "all" else _chosen_devices(chosen, kind.type)
    if chosen != "all" or options.get("multi_gpu"):
        wanted = "--multi_gpu" if chosen == "all" else f"--gpu_ids={chosen}"
        raise ConfigError(f"{wanted}: this machine has no accelerator device. --cpu runs the processes on the CPU.")
    if options.get("wants_devices"):
        note("this machine has no accelerator device: the processes run on the CPU.")
    return 0, {}


def _chosen_devices(chosen: str, device_type: str) -> tuple[int, dict[str, str]]:
    """As `_devices`, for what `--gpu_ids` names."""
    ids = [part.strip() for part in chosen.split(",")]
    if "" in ids or len(set(ids)) < len(ids):
        raise ConfigError(f"--gpu_ids={chosen}. Expected different numbers with commas between them, such as 0,2.")
    if device_type not in VISIBLE_DEVICES:
        raise ConfigError(
            f"--gpu_ids={chosen}: devices of type {type_word(device_type)} can't be chosen. Leave it out to use all."
        )
    return len(ids), {VISIBLE_DEVICES[device_type]: ",".join(ids)}


def _check_count(options: Mapping[str, Any], num_processes: int, number: int) -> None:
    if options.get("multi_gpu") and num_processes < 2:
        raise ConfigError(f"--multi_gpu with num_processes={num_processes}. Expected at least 2, or leave it out.")
    if num_processes == -1:
        raise ConfigError("num_processes: -1, which leaves it open. Give --num_processes a number.")
    here = num_processes // max(1, options.get("num_machines", 1))
    if 0 < number < here:
        raise ConfigError(
            f"{here} processes on this machine need as many devices, and it has {number} to use. Lower "
            "--num_processes, name more --gpu_ids, or use --cpu."
        )


def _variables(options: Mapping[str, Any]) -> dict[str, str]:
    """What the processes learn by their environment."""
    found = variables_of(options)
    if options.get("multi_gpu"):
        found[OPTIONS["cpu"].variable] = "false"
    if options.get("use_deepspeed"):
        found["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(options.get("deepspeed_fields", ()))
    return found


def _pairs(text: str) -> dict[str, str]:
    """`a=1,b=2` as a mapping."""
    pairs = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise ConfigError(f"rdzv_conf={text!r}. Expected name=value pairs, such as timeout=60,read_timeout=60.")
        pairs[name.strip()] = value.strip()
    return pairs


def _command(rest: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The program with its arguments, each as it was given."""
    if not rest:
        raise ConfigError("no script is given. Expected: loopwright launch [options] script.py [its arguments].")
    script, arguments = rest[0], list(rest[1:])
    if options.get("no_python"):
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r}. Check the spelling, and that it may be run.")
        return [script, *arguments]
    if options.get("module"):
        _check_module(script)
        return [sys.executable, "-u", "-m", script, *arguments]
    if not script:
        raise ConfigError("the script's name is empty. Expected: loopwright launch [options] script.py [arguments].")
    _check_script(Path(script))
    return [sys.executable, "-u", script, *arguments]


def _check_script(script: Path) -> None:
    if script.is_file() or (script / "__main__.py").is_file():
        return
    if script.is_dir():
        raise ConfigError(f"the script {script} is a folder without a __main__.py. Name a file in it.")
    near = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
    hint = suggest(script.name, near, is_listed=False)
    text = f"there is no script {str(script)!r}. {hint} The working directory is {Path.cwd()}."
    raise ConfigError(text.replace(".  ", ". "))


def _check_module(module: str) -> None:
    importlib.invalidate_caches()
    found = _find_module(module)
    if found is None:
        name = module.removesuffix(".py").replace("/", ".")
        hint = f"Did you mean {name!r}? " if name != module and _find_module(name) else ""
        raise ConfigError(
            f"there is no module {module!r} in the working directory {Path.cwd()} or among the installed packages. "
            f"{hint}".rstrip()
        )
    if found.submodule_search_locations is not None and _find_module(f"{module}.__main__") is None:
        raise ConfigError(f"the module {module} is a package without a __main__.py. Name a module in it.")


def _find_module(module: str) -> ModuleSpec | None:
    """Where a module stands, without importing the packages that it is in: that may take long, and start devices."""
    places, found = [str(Path.cwd()), *sys.path], None
    parts = module.split(".")
    for i, part in enumerate(parts, start=1):
        if not part.isidentifier():
            return None
        found = PathFinder.find_spec(".".join(parts[:i]), places)
        if found is None and i == 1:
            found = importlib.util.find_spec(part)  # built in, or by an import hook of an editable installation
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    return found
