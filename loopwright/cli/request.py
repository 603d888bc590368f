"""What a command line asks for: the file, the options of the command, and the flags that set keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..distributed.errors import ConfigError

OPTIONS = {
    "fit": (),
    "plan": ("world_size", "device_memory"),
    "validate": ("weights",),
    "test": ("weights",),
    "predict": ("weights", "output"),
    "verify-resume": ("steps", "stops", "seed"),
}
"""The options with a value that belong to the command and not to the file, by command."""
SWITCHES = ("print_config", "help")


@dataclass(slots=True)
class Request:
    """A command line, read."""

    command: str
    file: Path | None = None
    options: dict[str, str] = field(default_factory=dict)
    """Values of the command's own options."""
    switches: set[str] = field(default_factory=set)
    """Which of `SWITCHES` are given."""
    flags: list[tuple[str, str]] = field(default_factory=list)
    """Dotted keys with their texts, in the order given."""
    class_help: tuple[str, str] | None = None
    """A key such as `trainer.callbacks.help` with the class that its help is asked for."""


def read_request(command: str, arguments: Sequence[str]) -> Request:
    """Read `FILE.yaml --key value --key=value ...` in any order.

    Raises:
        ConfigError: a value is missing, or there are two files.
    """
    request = Request(command)
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            request.switches.add("help")
        elif argument.startswith("--"):
            _read_option(request, argument.removeprefix("--"), rest)
        elif request.file is None:
            request.file = Path(argument)
        else:
            raise ConfigError(
                f"got two files, {str(request.file)!r} and {argument!r}. Expected one, and flags as --key value."
            )
    return request


def _read_option(request: Request, option: str, rest: list[str]) -> None:
    """Take one option, with its value from behind `=` or from the next argument, which may begin with one dash."""
    key, has_value, value = option.partition("=")
    key = key.replace("-", "_")
    if key in SWITCHES and not has_value:
        request.switches.add(key)
        return
    if not has_value:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"--{key} has no value. Write --{key}=VALUE, such as --{key}=true for a switch.")
        value = rest.pop(0)
    if key in OPTIONS[request.command]:
        request.options[key] = value
    elif key.endswith(".help"):
        request.class_help = (key, value)
    else:
        request.flags.append((key, value))
