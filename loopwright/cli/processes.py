"""The commands that run a YAML file, in this process or in several: `--devices 2`, or the options of `launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..distributed.errors import ConfigError
from ..distributed.launched import find_place
from .commands import check_config, run_config_command
from .launch import run_processes
from .launch_merge import merged_options, note
from .launch_options import Given, extract_launch
from .request import read_request
from .scalars import is_null
from .sources import Sources

_TRAINER_ARGUMENTS = {
    "mixed_precision": ("trainer.precision", "no"),
    "gradient_accumulation_steps": ("trainer.accumulate", 1),
}
"""Options for scripts, each with the key of a file that stands for it, and the value that asks for nothing."""


def run_file_command(command: str, arguments: Sequence[str]) -> int:
    """Run `fit`, `validate`, `test`, `predict` or `plan`, and return the exit code.

    Without launching options and with `trainer.devices` at 1 it runs in this process; otherwise in as many as are asked
    for, which torch's agent starts, watches and ends. `test` without a file is the self-check.

    Raises:
        ConfigError: the arguments, the file or its values can't be used.
        LaunchError: the processes could not be started.
    """
    given = extract_launch(arguments)
    rest = _long_devices(given.rest)
    if command == "test" and not rest:
        from .selfcheck import run_selfcheck

        return run_selfcheck(given.options)
    launcher = find_place().launcher
    _check_use(command, given, launcher)
    if command == "plan" or launcher != "none" or _prints_only(command, rest):
        return run_config_command(command, rest)
    devices = _devices(command, rest)
    if not given.options and (devices is None or devices < 2):
        return run_config_command(command, rest)
    check_config(command, rest)  # one message here in place of one from each process
    options = merged_options(given.options)
    _drop_script_options(command, options)
    machines = options.get("num_machines", 1)
    if devices is not None and "num_processes" in given.options:
        rest.append(f"--trainer.devices={given.options['num_processes'] // machines}")  # the file says another number
    elif devices is not None:
        options["num_processes"] = devices * machines
    return run_processes(command, options, [sys.executable, "-u", "-m", "loopwright", command, *rest])


def _drop_script_options(command: str, options: dict[str, Any]) -> None:
    """Take out what a launch file says to an `Accelerator`: a `Trainer` has arguments for it, which win."""
    for name, (argument, nothing) in _TRAINER_ARGUMENTS.items():
        value = options.pop(name, nothing)
        if value != nothing:
            note(f"{name}={value} of the launch file is not used by {command}: {argument} says it.")


def _check_use(command: str, given: Given, launcher: str) -> None:
    """Refuse launching options where nothing would be launched."""
    names = ", ".join(f"--{name}" for name in given.options)
    if names and command == "plan":
        raise ConfigError(f"{names}: plan starts no processes. Say --devices 2 to plan for two.")
    if names and launcher != "none":
        raise ConfigError(f"{names}: {launcher} has started these processes already. Leave the options out.")


def _long_devices(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--devices`, a short form, written out."""
    return [
        argument.replace("--devices", "--trainer.devices", 1)
        if argument == "--devices" or argument.startswith("--devices=")
        else argument
        for argument in arguments
    ]


def _prints_only(command: str, arguments: Sequence[str]) -> bool:
    """Whether a switch asks for a text, and nothing is run."""
    request = read_request(command, arguments)
    return bool(request.switches or request.class_help)


def _devices(command: str, arguments: Sequence[str]) -> int | None:
    """`trainer.devices` as a number, by the flags, the environment or the file; None where it is none."""
    request = read_request(command, arguments)
    if request.file is None:
        return None
    trainer = Sources.read(request.file, request.flags, os.environ).tree.get("trainer")
    value = trainer.get("devices") if isinstance(trainer, Mapping) else None
    text = "" if value is None or is_null(value) else str(value).replace("_", "")
    return int(text) if text.isdigit() else None
