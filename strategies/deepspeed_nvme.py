"""What offloading to NVMe needs: options of its transfers, a folder, and DeepSpeed's operator for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..distributed.errors import ConfigError, check_boolean, check_integer, suggest
from .deepspeed_config import NVME, OFFLOADS, offload_of

_NUMBERS = ("block_size", "queue_depth", "intra_op_parallelism")
_SWITCHES = ("single_submit", "overlap_events", "use_gds")


def check_transfers(config: Mapping[str, Any]) -> None:
    """Refuse options of transfers (the section `aio`) that are none. Local.

    Raises:
        ConfigError: one is unknown, or has a value that it can't have.
    """
    section = config.get("aio", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"aio={section!r:.80} in DeepSpeed's config. Expected a mapping with 'block_size'.")
    for name, value in section.items():
        if name not in (*_NUMBERS, *_SWITCHES):
            raise ConfigError(f"DeepSpeed's config has aio.{name}={value!r:.80}. {suggest(name, _NUMBERS + _SWITCHES)}")
        if name in _NUMBERS:
            check_integer(f"DeepSpeed's config has aio.{name}", value, 1)
        else:
            check_boolean(f"DeepSpeed's config has aio.{name}", value)


def check_nvme(config: Mapping[str, Any]) -> None:
    """Look whether this machine has what a configuration offloads to. Local; with NVMe it asks the compiler.

    Raises:
        ConfigError: a folder is missing or can't be written to, or DeepSpeed can't build its operator `async_io`.
    """
    sections = [name for name in OFFLOADS if offload_of(config, name.removeprefix("offload_")) == NVME]
    for name in sections:
        folder = os.path.expanduser(str(config["zero_optimization"][name]["nvme_path"]))
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            what = "can't be written to" if os.path.isdir(folder) else "is no folder of this machine"
            raise ConfigError(f"{name} has nvme_path={folder!r}, which {what}. Give one on the NVMe device.")
    if not sections:
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"{sections[0]}='nvme': DeepSpeed can't build its operator async_io. It needs a C++ compiler and libaio "
            "with its headers: apt install libaio-dev (yum install libaio-devel). Or offload to 'cpu'."
        )
