"""`loopwright config`: ask how scripts are launched on this machine, and write the launch file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..distributed.errors import ConfigError, suggest
from ..distributed.ports import DEFAULT_PORT
from .asking import ask, fill
from .launch_config import default_keys, default_path, read_keys, read_launch_file, type_word, write_launch_file
from .strategy_questions import ask_strategy

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
    keys = read_keys(path)
    kept = {name: keys[name] for name in (*file.sections, *file.unused)}
    return {**default_keys(), "distributed_type": file.distributed_type, **given, **options, **kept}


def _ask_all(keys: dict[str, Any]) -> None:
    """Ask for the keys, one by one; what is there already is offered."""
    _ask_machines(keys)
    has_devices = not keys["use_cpu"]
    if has_devices:
        keys["use_cpu"] = ask("Stay on the CPU, although there are devices?", "cpu", False)
    fill(keys, "num_processes", "How many processes on all machines together?", keys["num_processes"])
    if has_devices and not keys["use_cpu"]:
        fill(keys, "gpu_ids", "Which devices (such as 0,2, or all)?", "all")
    keys["distributed_type"] = _type_of(keys)
    if keys["num_processes"] > 1:
        ask_strategy(keys)
    fill(keys, "mixed_precision", "Which number format (no, bf16, fp16)?", keys["mixed_precision"])
    steps = ask("How many micro-batches per optimizer step?", "gradient_accumulation_steps", 1, least=1)
    if steps > 1:
        keys["gradient_accumulation_steps"] = steps
    fill(keys, "enable_cpu_affinity", "Bind each process to cores of its own?", False)
    fill(keys, "debug", "Check shapes before each collective (slower)?", False)


def _ask_machines(keys: dict[str, Any]) -> None:
    if fill(keys, "num_machines", "How many machines?", 1, least=1) == 1:
        return
    fill(keys, "machine_rank", "Which of them is this, counted from 0?", 0)
    fill(keys, "main_process_ip", "The address of machine 0?", None)
    fill(keys, "main_process_port", "A free port on it?", DEFAULT_PORT, least=1)
    fill(keys, "rdzv_backend", "How do the launchers meet (static, c10d)?", "static")
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
