"""Several machines by DeepSpeed's means: its hostfile and filters, and the command that starts them by `deepspeed`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..distributed.atomic import whole_file
from ..distributed.errors import ConfigError, MissingDependencyError, suggest
from ..distributed.ports import DEFAULT_PORT, is_this_machine
from .launch_merge import note

STANDARD = "standard"
"""The word for this command on each machine, which torch's agents start processes on."""
_FORBIDDEN = (";", "\n", "<", ">", " ")
"""What DeepSpeed's file of variables can't hold."""

Slots = dict[str, list[int]]
"""The machines by name, in the order of the file, each with the numbers of its slots."""


def read_hostfile(path: Path) -> Slots:
    """The machines of a hostfile, with lines such as `host-1 slots=4`.

    Raises:
        ConfigError: it can't be read, a line is something else, or a machine stands in it twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deepspeed_hostfile={str(path)!r} can't be read ({error}).") from error
    machines: Slots = {}
    for number, line in enumerate(lines, start=1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        name, slots = parts[0], parts[1].removeprefix("slots=") if len(parts) == 2 else ""
        if not slots.isdigit() or parts[1] == slots:
            raise ConfigError(f"{path}, line {number}: got {line.strip()!r}. Expected such as 'host-1 slots=4'.")
        if name in machines:
            raise ConfigError(f"{path}, line {number}: {name} stands in it twice. Give each machine one line.")
        machines[name] = list(range(int(slots)))
    if not machines:
        raise ConfigError(
            f"deepspeed_hostfile={str(path)!r} names no machine. Expected lines such as 'host-1 slots=4'."
        )
    return machines


def filtered(machines: Slots, inclusion: str | None, exclusion: str | None) -> Slots:
    """The machines and slots that are used.

    Args:
        machines: all.
        inclusion: which are used, such as `host-1@host-2:0,2`: host-1 with all slots, host-2 with two; None: all.
        exclusion: which are not, likewise.
    Raises:
        ConfigError: a filter names a machine or a slot that is not there, or leaves none.
    """
    text, option = (inclusion, "inclusion") if inclusion else (exclusion, "exclusion")
    if not text:
        return machines
    named = _named(machines, text, f"deepspeed_{option}_filter={text!r}")
    if inclusion:
        return {name: named[name] for name in machines if name in named}
    rest = {name: [slot for slot in slots if slot not in named.get(name, ())] for name, slots in machines.items()}
    found = {name: slots for name, slots in rest.items() if slots}
    if not found:
        raise ConfigError(f"deepspeed_exclusion_filter={text!r} leaves no machine. Exclude less.")
    return found


def on_machines(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with what the hostfile says of the machines where nothing else says it.

    Raises:
        ConfigError: the hostfile or a filter can't be used, machines have different numbers of slots, or this one is
            none of them.
    """
    found = dict(options)
    if not options.get("use_deepspeed") or "deepspeed_hostfile" not in options:
        return found
    path = Path(options["deepspeed_hostfile"]).expanduser()
    filters = options.get("deepspeed_inclusion_filter"), options.get("deepspeed_exclusion_filter")
    machines = filtered(read_hostfile(path), *filters)
    if options.get("num_machines", len(machines)) != len(machines):
        raise ConfigError(f"num_machines={options['num_machines']}, and {path} gives {len(machines)}. Leave that out.")
    found["num_machines"] = len(machines)
    if options.get("deepspeed_multinode_launcher") != STANDARD or len(machines) == 1:
        return found
    counts = {len(slots) for slots in machines.values()}
    if len(counts) > 1:
        raise ConfigError(
            f"{path}: the machines have {', '.join(str(len(slots)) for slots in machines.values())} slots. Expected as "
            "many on each; a filter can leave some out."
        )
    found.setdefault("num_processes", sum(len(slots) for slots in machines.values()))
    found.setdefault("main_process_ip", next(iter(machines)))
    found.setdefault("machine_rank", _rank_here(machines, path))
    return found


def is_for_deepspeed(options: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's own launcher starts the processes, on several machines."""
    is_standard = options.get("deepspeed_multinode_launcher") == STANDARD
    return bool(options.get("use_deepspeed")) and options.get("num_machines", 1) > 1 and not is_standard


def deepspeed_command(options: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """The command that starts a script on all machines.

    Args:
        options: as `on_machines` gives them.
        rest: the script and its arguments.
    Raises:
        ConfigError: there is no hostfile.
    """
    if "deepspeed_hostfile" not in options:
        raise ConfigError(
            f"num_machines={options['num_machines']} with --use_deepspeed needs deepspeed_hostfile, a file with a line "
            "such as 'host-1 slots=4' for each machine; or --deepspeed_multinode_launcher standard, and this command "
            "on each of them."
        )
    launcher = options.get("deepspeed_multinode_launcher", "pdsh")
    command = ["deepspeed", "--hostfile", str(options["deepspeed_hostfile"])]
    if launcher == "nossh":
        command += ["--node_rank", str(options.get("machine_rank", 0)), "--no_ssh"]
    else:
        command += ["--no_local_rank", "--launcher", launcher]
    if "deepspeed_exclusion_filter" in options:
        command += ["--exclude", options["deepspeed_exclusion_filter"]]
    elif "deepspeed_inclusion_filter" in options:
        command += ["--include", options["deepspeed_inclusion_filter"]]
    elif "num_processes" in options:
        command += ["--num_gpus", str(options["num_processes"] // options["num_machines"])]
    if "main_process_ip" in options:
        command += ["--master_addr", options["main_process_ip"]]
    command += ["--master_port", str(options.get("main_process_port") or DEFAULT_PORT)]
    command += [f"--{name}" for name in ("module", "no_python") if options.get(name)]
    return [*command, *rest]


def run_deepspeed(options: Mapping[str, Any], rest: Sequence[str], variables: Mapping[str, str]) -> int:
    """Start a script on all machines by DeepSpeed's launcher, which also runs on this one, and return its exit code.

    Raises:
        ConfigError: there is no hostfile.
        MissingDependencyError: DeepSpeed is not installed.
    """
    command = deepspeed_command(options, rest)
    if shutil.which(command[0]) is None:
        raise MissingDependencyError("--use_deepspeed needs the program deepspeed. pip install 'loopwright[deepspeed]'")
    folders = filter(None, (os.environ.get("PYTHONPATH", ""), str(Path.cwd())))
    environment = {**variables, "PYTHONPATH": os.pathsep.join(folders)}
    write_environment(Path(os.environ.get("DS_ENV_FILE") or ".deepspeed_env"), environment)
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def write_environment(path: Path, variables: Mapping[str, str]) -> None:
    """Write the variables for the other machines where DeepSpeed reads them. Lines of others stay.

    Only what the launch sets is written: the rest of this process's environment may hold secrets.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if line.partition("=")[0] not in variables]
    for name, value in variables.items():
        if not value or any(each in value for each in _FORBIDDEN):
            note(f"{name}={value!r} is not handed to other machines: {path} can't hold it.")
        else:
            kept.append(f"{name}={value}")
    with whole_file(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _named(machines: Slots, text: str, where: str) -> Slots:
    """What a filter names."""
    found: Slots = {}
    for part in filter(None, (part.strip() for part in text.split("@"))):
        name, colon, numbers = part.partition(":")
        if name not in machines:
            raise ConfigError(f"{where}: the hostfile has no machine {name!r}. {suggest(name, machines)}")
        slots = numbers.split(",") if colon else list(map(str, machines[name]))
        unknown = [slot for slot in slots if not slot.isdigit() or int(slot) not in machines[name]]
        if unknown:
            raise ConfigError(f"{where}: {name} has no slot {unknown[0]!r}, but 0 to {len(machines[name]) - 1}.")
        found[name] = [int(slot) for slot in slots]
    if not found:
        raise ConfigError(f"{where}. Expected names of machines, such as host-1@host-2:0,2.")
    return found


def _rank_here(machines: Slots, path: Path) -> int:
    """This machine's index among them."""
    for index, name in enumerate(machines):
        if is_this_machine(name):
            return index
    raise ConfigError(f"this machine is none of {path}: {', '.join(machines)}. Give --machine_rank on each of them.")
