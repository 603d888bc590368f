"""`loopwright config`: ask how scripts are launched on this machine, and write the launch file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..distributed.errors import ConfigError, suggest
from .launch_config import default_keys, default_path, read_launch_file, type_word, write_launch_file
from .launch_options import OPTIONS, convert

HELP = """\
usage: loopwright config [default | update] [--config_file FILE] [--mixed_precision bf16]

Asks how scripts are launched on this machine and writes the answers down, for `loopwright launch`.

  default, --default   ask nothing: one process per accelerator device. An existing file is kept
  update, --update     read the file, and write it again with the keys of this version filled in

  --config_file FILE   the file, in place of the default one
  --mixed_precision W  with default: no, bf16 or fp16
"""
ACTIONS = ("default", "update")


def run_config(arguments: Sequence[str]) -> int:
    """Write the launch file, and return 0; 1 where there is one that `default` would overwrite.

    Raises:
        ConfigError: an argument or an answer can't be used.
    """
    action, values = _read(arguments)
    if action == "help":
        print(HELP, end="")
        return 0
    path = Path(values["config_file"]).expanduser() if "config_file" in values else default_path()
    if action == "default" and path.exists():
        print(f"{path} is there already, and stays as it is. Delete it, or name another --config_file.")
        return 1
    if action == "update":
        keys = _updated(path)
    else:
        keys = default_keys(values.get("mixed_precision", "no"))
        if action == "ask":
            _ask_all(keys)
    write_launch_file(path, keys)
    print(f"Written to {path}")
    return 0


def _read(arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What to do, and the options."""
    action, values, rest = "ask", {}, list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.lstrip("-").replace("-", "_").partition("=")
        if argument in ("-h", "--help"):
            return "help", {}
        if name in ACTIONS and not equals:
            action = name
        elif argument.startswith("--") and name in ("config_file", "mixed_precision"):
            if not equals and not rest:
                raise ConfigError(f"--{name} has no value. Give one: --{name}=...")
            values[name] = argument.partition("=")[2] if equals else rest.pop(0)
        else:
            raise ConfigError(f"{argument} is not known. {suggest(name, [*ACTIONS, 'config_file', 'mixed_precision'])}")
    return action, values


def _updated(path: Path) -> dict[str, Any]:
    """The keys of a file, with those that it lacks."""
    file = read_launch_file(path)
    options = dict(file.options)
    given: dict[str, Any] = {"use_cpu": options.pop("cpu")} if "cpu" in options else {}
    return {**default_keys(), "distributed_type": file.distributed_type, **given, **options, **_kept(path, file.unused)}


def _kept(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The keys of a file that this version does not use, as they are."""
    import yaml

    keys = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    return {name: keys[name] for name in names}


def _ask_all(keys: dict[str, Any]) -> None:
    """Ask for the keys, one by one; what is there already is offered."""
    _ask_machines(keys)
    has_devices = not keys["use_cpu"]
    if has_devices:
        keys["use_cpu"] = _ask("Stay on the CPU, although there are devices?", "cpu", False)
    keys["num_processes"] = _ask("How many processes on all machines together?", "num_processes", keys["num_processes"])
    if has_devices and not keys["use_cpu"]:
        keys["gpu_ids"] = _ask("Which devices (such as 0,2, or all)?", "gpu_ids", "all")
    keys["distributed_type"] = _type_of(keys)
    keys["mixed_precision"] = _ask("Which number format (no, bf16, fp16)?", "mixed_precision", keys["mixed_precision"])
    steps = _ask("How many micro-batches per optimizer step?", "gradient_accumulation_steps", 1, least=1)
    if steps > 1:
        keys["gradient_accumulation_steps"] = steps
    keys["enable_cpu_affinity"] = _ask("Bind each process to cores of its own?", "enable_cpu_affinity", False)
    keys["debug"] = _ask("Check shapes before each collective (slower)?", "debug", False)


def _ask_machines(keys: dict[str, Any]) -> None:
    keys["num_machines"] = _ask("How many machines?", "num_machines", 1, least=1)
    if keys["num_machines"] == 1:
        return
    keys["machine_rank"] = _ask("Which of them is this, counted from 0?", "machine_rank", 0)
    keys["main_process_ip"] = _ask("The address of machine 0?", "main_process_ip", None)
    keys["main_process_port"] = _ask("A free port on it?", "main_process_port", 29500, least=1)
    keys["rdzv_backend"] = _ask("How do the launchers meet (static, c10d)?", "rdzv_backend", "static")
    keys["num_processes"] *= keys["num_machines"]


def _type_of(keys: dict[str, Any]) -> str:
    """Accelerate's word for the answers."""
    if keys["num_processes"] == 1:
        return "NO"
    if keys["use_cpu"]:
        return "MULTI_CPU"
    import torch

    kind = torch.accelerator.current_accelerator()
    return f"MULTI_{type_word(kind.type)}" if kind is not None else "MULTI_CPU"


def _ask(question: str, name: str, default: Any, *, least: int | None = None) -> Any:
    """One answer, as the option takes it; asked again until it can be used. Enter takes the default.

    Raises:
        ConfigError: the input has ended.
    """
    shown = {True: "yes", False: "no", None: ""}.get(default, default) if OPTIONS[name].kind is bool else default
    while True:
        text = _input(f"{question} [{'' if shown is None else shown}] ").strip()
        if not text and default is not None:
            return default
        problem = _problem(text, name, least)
        if problem is None:
            return convert(name, text, question)
        print(problem)


def _problem(text: str, name: str, least: int | None) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if not text:
        return "An answer is needed."
    try:
        value = convert(name, text, "Answer")
    except ConfigError as error:
        return str(error)
    if least is not None and value < least:
        return f"Answer: got {text!r}. Expected an integer >= {least}."
    return None


def _input(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError as error:
        raise ConfigError(
            "the input ended before all questions were answered. `loopwright config --default` asks nothing."
        ) from error
