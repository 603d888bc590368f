"""`loopwright env`: what a bug report needs to say about a machine, and nothing secret."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from .. import __version__
from ..distributed.environment import KEY_PREFIX, variable_names
from ..distributed.errors import ConfigError
from .launch_config import find_default, read_launch_file

REQUIRED = ("safetensors", "pyyaml", "tqdm", "tensorboard", "jsonargparse", "numpy")
OPTIONAL = (
    "torchmetrics", "wandb", "mlflow", "deepspeed", "torchao", "bitsandbytes", "torch-xla", "transformers",
    "accelerate", "lightning", "pytorch-ignite",
)  # fmt: skip


def run_env(arguments: Sequence[str]) -> int:
    """Print versions, platform, devices and packages.

    Raises:
        ConfigError: arguments were given.
    """
    if arguments:
        raise ConfigError(f"takes no arguments, got {' '.join(arguments)!r}.")
    for name, value in describe():
        print(f"{name + ':':<22}{value}")
    return 0


def describe() -> Iterator[tuple[str, str]]:
    """Pairs of a name and a value."""
    import torch

    yield "loopwright", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPUs"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} threads"
    yield "devices", ", ".join(_devices())
    for name in REQUIRED:
        yield name, _version(name) or "not installed"
    found = {name: version for name in OPTIONAL if (version := _version(name))}
    yield "optional packages", ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    yield "launch file", _launch_file()
    yield "variables set", ", ".join(_variables()) or "none"


def _variables() -> Iterator[str]:
    """Those that are read. The keys of a file may hold secrets, and so may what only looks like ours: names alone."""
    for name, text in sorted(os.environ.items()):
        if name in variable_names():
            yield f"{name}={text}"
        elif name.startswith(KEY_PREFIX):
            yield name


def _launch_file() -> str:
    """Which launch file is used, and what it says."""
    path = find_default()
    if path is None:
        return "none"
    try:
        file = read_launch_file(path)
    except ConfigError as error:
        return str(error)
    settings = {"distributed_type": file.distributed_type, **file.options}
    settings |= {name: value for section in file.sections.values() for name, value in section.items()}
    return f"{path} ({', '.join(f'{name}: {value}' for name, value in settings.items())})"


def _devices() -> Iterator[str]:
    import torch

    yield "cpu"
    if not torch.accelerator.is_available():
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        name = torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""
        yield f"{kind}:{index} {name}".strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
