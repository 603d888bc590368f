"""`loopwright checkpoint show|verify|convert`: what checkpoints hold, if they are whole, and their weights alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..distributed.errors import ConfigError, suggest

USAGE = """\
usage: loopwright checkpoint show PATH [--tree NAME] [--json]
       loopwright checkpoint verify PATH... [--json]
       loopwright checkpoint convert PATH OUT [--to safetensors] [--max_shard_size 5GB] [--prefix model.]

show     what a checkpoint holds, and where it comes from; or what another library's weights hold
  --tree NAME             list the values of one of its states
verify   read all files of checkpoints and compare their checksums; exit code 1 if one is damaged
         PATH: a checkpoint, or a folder with checkpoints at any depth
convert  write the weights of a checkpoint, of a folder of Hugging Face or Accelerate, or of a Lightning or PyTorch file
         (.ckpt, .bin, .pt, .pth) into a new folder OUT; no code that a file names is run
  --to KIND               safetensors (model.safetensors; the default), or torch (pytorch_model.bin)
  --max_shard_size SIZE   several files of at most this size, such as 5GB, and an index
  --prefix TEXT           only the weights whose names begin with this, without it

--json    print JSON
"""
DAMAGED = 1
"""The exit code of `verify` when something is damaged."""


class Form(NamedTuple):
    """What one of the commands takes."""

    wanted: str
    num_paths: range
    options: tuple[str, ...]
    """Those with a value."""
    switches: tuple[str, ...] = ("json",)


FORMS: Mapping[str, Form] = {
    "show": Form("PATH", range(1, 2), ("tree",)),
    "verify": Form("PATH...", range(1, sys.maxsize), ()),
    "convert": Form("PATH OUT", range(2, 3), ("to", "max_shard_size", "prefix")),
}


@dataclass(slots=True)
class Asked:
    """A command line, read."""

    command: str
    paths: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)


def run_checkpoint(arguments: Sequence[str]) -> int:
    """Run `show`, `verify` or `convert`; returns 0, or 1 where `verify` found damage.

    Raises:
        ConfigError: the arguments can't be used.
        CheckpointError: what they name is no checkpoint, or can't be read or written.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    asked = read_arguments(arguments)
    if asked.command == "verify":
        from .checkpoint_verify import run_verify

        return run_verify(asked.paths, as_json="json" in asked.switches)
    commands: dict[str, Callable[[Asked], None]] = {"show": _show, "convert": _convert}
    commands[asked.command](asked)
    return 0


def read_arguments(arguments: Sequence[str]) -> Asked:
    """Read `show PATH --tree state`; options may stand anywhere, `-` and `_` are the same in their names.

    Raises:
        ConfigError: there is no such command or option, a value is missing, or there are too many paths or too few.
    """
    if not arguments or arguments[0] not in FORMS:
        given = f"{arguments[0]!r} is no command of it" if arguments else "no command is given"
        raise ConfigError(f"{given}. {suggest(arguments[0] if arguments else '', FORMS)}\n{USAGE.rstrip()}")
    return read_rest(arguments[0], FORMS[arguments[0]], arguments[1:])


def read_rest(command: str, form: Form, arguments: Sequence[str]) -> Asked:
    """Read what stands behind a command.

    Raises:
        ConfigError: there is no such option, a value is missing, or there are too many paths or too few.
    """
    asked, rest = Asked(command), list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            asked.paths += rest
            break
        if word.startswith("--"):
            _read_option(asked, form, word, rest)
        else:
            asked.paths.append(word)
    if len(asked.paths) not in form.num_paths:
        raise ConfigError(f"{asked.command}: got {len(asked.paths)} paths. Expected {asked.command} {form.wanted}.")
    return asked


def _read_option(asked: Asked, form: Form, word: str, rest: list[str]) -> None:
    name, has_value, value = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if name in form.switches and not has_value:
        asked.switches.add(name)
    elif name not in form.options:
        accepted = (f"--{each}" for each in (*form.options, *form.switches))
        raise ConfigError(f"{asked.command} has no option {word!r}. {suggest(f'--{name}', accepted)}")
    elif has_value:
        asked.options[name] = value
    elif rest and not rest[0].startswith("--"):
        asked.options[name] = rest.pop(0)
    else:
        raise ConfigError(f"--{name} has no value. Write --{name}=VALUE.")


def _show(asked: Asked) -> None:
    from .checkpoint_show import show

    show(asked.paths[0], tree=asked.options.get("tree"), as_json="json" in asked.switches)


def _convert(asked: Asked) -> None:
    from .checkpoint_convert import run_convert

    run_convert(*asked.paths, options=asked.options, as_json="json" in asked.switches)
