"""The launch file: a YAML or JSON file with Accelerate's keys, which says how a script is launched on this machine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..distributed.atomic import whole_file
from ..distributed.errors import ConfigError, suggest
from .launch_options import ALIASES, absent, convert
from .launch_tables import OPTIONS, SECTIONS

TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA",
    "FSDP", "DEEPSPEED", "XLA", "TPU",
)  # fmt: skip
"""What `distributed_type` can be: one process; several on the CPU or on devices; or what spreads models over them."""
_SECTION_OF_TYPE = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
_ABSENT_TYPES = {
    "MEGATRON_LM": "Megatron-LM is not available",
    "TP": "tensor parallelism is an axis of a mesh: distributed_type: FSDP, with a parallelism_config",
    "MULTI_NEURON": "Neuron devices are not available in this version",
}
_SAME_NAME = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "same_network", "gpu_ids",
    "mixed_precision", "enable_cpu_affinity", "debug", "rdzv_backend", "gradient_accumulation_steps",
    "num_cpu_threads_per_process", "max_restarts", "monitor_interval", "rdzv_conf", "role", "tee", "log_dir",
)  # fmt: skip
_FOR_OTHERS = (
    "megatron_lm_config", "mpirun_config", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file",
    "commands", "tpu_vm", "tpu_env", "downcast_bf16", "main_training_function",
)  # fmt: skip
"""Accelerate's keys for what is not there."""
_BACKEND = "dynamo_backend"
"""The key of old files, which stands in a section now."""
KEYS = ("compute_environment", "distributed_type", "use_cpu", "fp16", _BACKEND, *_SAME_NAME, *SECTIONS, *_FOR_OTHERS)
"""The keys of a launch file."""


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """A launch file that was read."""

    path: Path | None = None
    """Where it stands; None: there is none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names of `OPTIONS`, those of sections apart."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The values of each section that has some, likewise by the names of `OPTIONS`."""
    distributed_type: str = "NO"
    """One of `TYPES`, or Accelerate's word for what is not there."""
    unused: tuple[str, ...] = ()
    """Keys that ask for what is not there."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The sections that the file itself switches on."""
        by_type = _SECTION_OF_TYPE.get(self.distributed_type)
        by_itself = "parallelism_config" if "parallelism_config" in self.sections else None
        by_word = [name for name, section in SECTIONS.items() if section.takes_word and section.is_on(self._all(name))]
        return tuple(name for name in SECTIONS if name in (by_type, by_itself, *by_word))

    def _all(self, section: str) -> dict[str, Any]:
        return {**self.options, **self.sections.get(section, {})}

    @property
    def is_for_xla(self) -> bool:
        """Whether it asks for torch_xla; "TPU" is the word of old files."""
        return self.distributed_type in ("XLA", "TPU")

    def absent_type(self) -> str | None:
        """What to say of a `distributed_type` that is not there; None where it is one of `TYPES`."""
        return _ABSENT_TYPES.get(self.distributed_type)


def default_path() -> Path:
    """Where `loopwright config` writes: `$XDG_CACHE_HOME/loopwright/launch.yaml`, else in `~/.cache`."""
    return _cache_folder() / "loopwright" / "launch.yaml"


def accelerate_path() -> Path:
    """Where Accelerate keeps its default file."""
    home = os.environ.get("HF_HOME", "")
    base = Path(home) if home else _cache_folder() / "huggingface"
    return base / "accelerate" / "default_config.yaml"


def find_default() -> Path | None:
    """The launch file of this user: ours, else Accelerate's, else None."""
    return next((path for path in (default_path(), accelerate_path()) if path.is_file()), None)


def read_launch_file(path: Path) -> LaunchFile:
    """Read and check a launch file.

    Raises:
        ConfigError: it is not there, can't be read, lacks `distributed_type`, or has an unknown key or a wrong value.
    """
    keys = read_keys(path)
    unknown = sorted(str(key) for key in keys if key not in KEYS)
    if unknown:
        named = ", ".join(unknown)
        raise ConfigError(f"{path}: unknown key{'s' * (len(unknown) > 1)} {named}. {suggest(unknown[0], KEYS)}")
    if str(keys.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        raise ConfigError(
            f"{path}: compute_environment={keys['compute_environment']!r}. Expected LOCAL_MACHINE; SageMaker is not "
            "available."
        )
    if keys.get("distributed_type") is None:
        raise ConfigError(f"{path} lacks the key distributed_type. Accepted: {', '.join(TYPES)}.")
    kind = "NO" if keys["distributed_type"] is False else str(keys["distributed_type"])  # YAML reads NO as false
    if kind not in TYPES and kind not in _ABSENT_TYPES:
        raise ConfigError(f"{path}: distributed_type={kind!r} is unknown. {suggest(kind, TYPES)}")
    sections = {name: found for name in SECTIONS if (found := _section(keys, name, path)) not in ({}, {_BACKEND: "no"})}
    return LaunchFile(path, _options(keys, path), sections, kind, _unused(keys))


def write_launch_file(path: Path, keys: Mapping[str, Any]) -> None:
    """Write a launch file, whole or not at all; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(yaml.safe_dump(dict(keys), sort_keys=True), encoding="utf-8")


def default_keys(mixed_precision: str = "no") -> dict[str, Any]:
    """The keys of a launch file for this machine: one process per accelerator device, else one on the CPU."""
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator() if count else None
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": f"MULTI_{type_word(kind.type)}" if kind is not None and count > 1 else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "mixed_precision": convert("mixed_precision", mixed_precision, "--mixed_precision"),
        "num_machines": 1,
        "num_processes": max(1, count),
        "use_cpu": count == 0,
    }


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """The launch file for this machine, written without questions; False where there is one, which stays. Local.

    Args:
        mixed_precision: no, bf16, fp16 or fp8.
        save_location: where; by default the file that `loopwright launch` reads by itself.
    Raises:
        ConfigError: the precision is another word.
    """
    keys = default_keys(mixed_precision)
    path = default_path() if save_location is None else Path(save_location).expanduser()
    if path.exists():
        warnings.warn(f"{path} is there already, and stays as it is. Name another save_location.", stacklevel=2)
        return False
    write_launch_file(path, keys)
    return path


def type_word(device_type: str) -> str:
    """Accelerate's word for a kind of device."""
    return {"cuda": "GPU"}.get(device_type, device_type.upper())


def _cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if given else Path.home() / ".cache"


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a launch file as they stand in it, unchecked.

    Raises:
        ConfigError: it is not there, can't be read, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        keys = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the launch file {path} can't be read ({error}). `loopwright config` writes one.") from error
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(f"the launch file {path} can't be read: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"the launch file {path} is not a mapping. Expected keys such as num_processes: 2.")
    return keys


def _options(keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The keys that are options as well."""
    given = {name: keys[name] for name in _SAME_NAME if keys.get(name) is not None}
    if keys.get("use_cpu") is not None:
        given["cpu"] = keys["use_cpu"]
    if keys.get("fp16") and "mixed_precision" not in given:
        given["mixed_precision"] = "fp16"
    if isinstance(given.get("rdzv_conf"), dict):
        given["rdzv_conf"] = ",".join(f"{name}={value}" for name, value in given["rdzv_conf"].items())
    deepspeed = keys.get("deepspeed_config") or {}
    if isinstance(deepspeed, dict) and deepspeed.get("gradient_accumulation_steps", "auto") != "auto":
        # The one place where Accelerate's files have it.
        given.setdefault("gradient_accumulation_steps", deepspeed["gradient_accumulation_steps"])
    assert given.keys() <= OPTIONS.keys()
    return {name: convert(name, value, f"{path}: {name}") for name, value in given.items()}


def _section(keys: Mapping[str, Any], section: str, path: Path) -> dict[str, Any]:
    """The options of one section; those that say nothing are left out."""
    given = keys.get(section) or {}
    if section == "dynamo_config" and isinstance(given, dict) and keys.get(_BACKEND) is not None:
        given = {_BACKEND: keys[_BACKEND], **given}
    if not isinstance(given, dict):
        raise ConfigError(
            f"{path}: {section} is not a mapping. Expected keys such as {list(SECTIONS[section].table)[1]}."
        )
    found = {}
    for key, value in given.items():
        name = _name_in(section, str(key), f"{path}: {section}.{key}")
        if value is None or value in ("auto", [], "") or name == "gradient_accumulation_steps":
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        found[name] = convert(name, text, f"{path}: {section}.{key}")
    return found


def _name_in(section: str, key: str, where: str) -> str:
    """The option that a key of a section means: by its own name, in another spelling, or without the prefix."""
    table, prefix = SECTIONS[section].table, SECTIONS[section].prefix
    for spelling in (key, prefix + key):
        name = ALIASES.get(spelling, spelling)
        if name in table or (section == "deepspeed_config" and name == "gradient_accumulation_steps"):
            return name
    remedy = absent(key) or suggest(key, list(table)[1:])
    raise ConfigError(f"{where} is not known. {remedy}")


def _unused(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that ask for what is not there; those that Accelerate writes into every file ask for nothing."""
    nothing: tuple[object, ...] = (None, False, "no", "NO", "main", {}, [])
    return tuple(key for key in _FOR_OTHERS if keys.get(key) not in nothing)
