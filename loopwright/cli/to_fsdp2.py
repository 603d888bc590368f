"""`loopwright to-fsdp2`: a launch file with options of FSDP's first version, written with those of the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..distributed.errors import ConfigError
from ..strategies.fsdp_words import FREEING, SHARDING_STRATEGIES
from .checkpoint import Form, read_rest
from .launch_config import read_keys, read_launch_file, write_launch_file
from .launch_merge import note

HELP = """\
usage: loopwright to-fsdp2 --config_file FILE (--output_file FILE | --overwrite)

Writes a launch file whose options of FSDP are version 2's. Both versions are understood and run the same here.

  --config_file FILE   the file that is read
  --output_file FILE   the file that is written
  --overwrite          write although it is there; without --output_file: into the file that was read
"""
_FORM = Form("with options alone", range(1), ("config_file", "output_file"), ("overwrite",))
_REMOVED = {
    "fsdp_backward_prefetch": "always done",
    "fsdp_backward_prefetch_policy": "always done",
    "fsdp_sync_module_states": "always so",
    "fsdp_use_orig_params": "always so",
    "fsdp_forward_prefetch": "not in version 2",
}
"""Version 1's options that version 2 lacks."""
_SHARDING = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")


def run_to_fsdp2(arguments: Sequence[str]) -> int:
    """Convert a file, and return 0.

    Raises:
        ConfigError: an argument or the file can't be used, or there is a file that would be overwritten.
    """
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    asked = read_rest("to-fsdp2", _FORM, arguments)
    if "config_file" not in asked.options:
        raise ConfigError("--config_file is missing, the file that is read.")
    source = Path(asked.options["config_file"]).expanduser()
    overwrites = "overwrite" in asked.switches
    if "output_file" not in asked.options and not overwrites:
        raise ConfigError("--output_file is missing. Name one, or use --overwrite to change the file itself.")
    target = Path(asked.options.get("output_file", str(source))).expanduser()
    if target.exists() and not overwrites:
        raise ConfigError(f"{target} is there already. Name another --output_file, or use --overwrite.")
    read_launch_file(source)  # checks it
    write_launch_file(target, converted(read_keys(source), source))
    print(f"Written to {target}")
    return 0


def converted(keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The keys of a launch file with version 2's options; what is left out is said on stderr.

    Args:
        keys: of a file that was checked.
        path: where it stands.
    """
    given = {_full(name): value for name, value in (keys.get("fsdp_config") or {}).items()}
    if not given:
        note(f"{path} has no fsdp_config; it stays as it is.")
        return dict(keys)
    if str(given.get("fsdp_version", 1)) == "2":
        note(f"{path} is of version 2 already, and stays as it is. Set fsdp_version: 1 to convert what else is in it.")
        return dict(keys)
    found: dict[str, Any] = {"fsdp_version": 2}
    for name, value in given.items():
        if name in _REMOVED:
            note(f"{name}={value} is left out: {_REMOVED[name]}.")
        elif name not in (*_SHARDING, "fsdp_version"):
            found[name] = value
    sharding = [given[name] for name in _SHARDING if given.get(name) is not None]
    if sharding:
        found["fsdp_reshard_after_forward"] = _frees(sharding[0])
    return {**keys, "fsdp_config": found}


def _frees(sharding: object) -> bool:
    """Whether version 1's word, or its number, frees weights after forward; a claim says it itself."""
    text = str(sharding).upper()
    if text.isdigit():
        text = SHARDING_STRATEGIES[int(text) - 1]
    if text.startswith("HYBRID") or text == "NO_SHARD":
        note(f"{text}: say by a parallelism_config, or by the mesh of FSDPStrategy, how many copies there are.")
    return text in (*FREEING, "TRUE")


def _full(name: str) -> str:
    return name if name.startswith("fsdp_") else f"fsdp_{name}"
