"""DeepSpeed's configuration: read from a file, a text or a mapping, and checked by itself."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

from ..distributed.errors import ConfigError, check_integer, check_number, suggest

ConfigLike: TypeAlias = "str | Path | Mapping[str, Any]"

AUTO = "auto"
"""The value that is filled from the run."""
STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2
NVME = "nvme"
DEVICES = ("none", "cpu", NVME)
HALF = ("bf16", "fp16")
"""Sections for numbers in 16 bits, which are also a run's words for them."""
OFFLOADS = ("offload_optimizer", "offload_param")
"""Sections for what is kept elsewhere."""
_SECTIONS = {"optimizer": "type", "scheduler": "type"} | dict.fromkeys(HALF, "enabled")
"""Sections that are mappings, and what stands in them."""
ONLY_STAGE_3 = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
"""Options of ZeRO++ and their values that ask for nothing."""
_COUNTS = (
    (None, "train_batch_size"),
    (None, "train_micro_batch_size_per_gpu"),
    (None, "gradient_accumulation_steps"),
    ("zero_optimization", "zero_hpz_partition_size"),
)
"""Sections and numbers in them that are at least 1."""
_ALTERNATIVES = b"-_"
"""Two characters of base64 in its form for addresses."""


def read_config(given: ConfigLike) -> dict[str, Any]:
    """A configuration as a mapping of its own. Local.

    Args:
        given: a mapping, the path of a JSON file, JSON, or JSON in base64.
    Raises:
        ConfigError: there is no such file, it holds no JSON object, or a section is no mapping.
    """
    if isinstance(given, Mapping):
        config = deepcopy(dict(given))
    elif isinstance(given, (str, Path)) and str(given):
        config = _parsed(*_text_of(given))
    else:
        raise ConfigError(f"DeepSpeed's config={given!r:.80}. Expected the path of a JSON file, or a mapping.")
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f"zero_optimization={zero!r:.80} in DeepSpeed's config. Expected a mapping with 'stage'.")
    if "bfloat16" in config:  # what DeepSpeed also calls it
        config.setdefault("bf16", config.pop("bfloat16"))
    for name, example in _SECTIONS.items():
        _check_section(config, name, example)
    for name in OFFLOADS:
        _check_section(zero, name, "device")
    for name in ("optimizer", "scheduler"):
        _check_section(config.get(name, {}), "params", "lr")
    return config


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a configuration asks for. Local.

    Raises:
        ConfigError: there is no such stage.
    """
    stage = config["zero_optimization"].get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        raise ConfigError(f"zero stage {stage!r} is unknown to DeepSpeed. Accepted: 0, 1, 2, 3.")
    return stage


def offload_of(config: Mapping[str, Any], what: str) -> str:
    """Where a configuration keeps the optimizer (`"optimizer"`) or the weights (`"param"`): a word of `DEVICES`. Local.

    Raises:
        ConfigError: the word is unknown.
    """
    section = config["zero_optimization"].get(f"offload_{what}")
    device = "none" if section is None else section.get("device", "none")
    if device == AUTO:
        return "none"
    if device not in DEVICES:
        raise ConfigError(f"offload_{what} to {device!r} is unknown. {suggest(device, DEVICES)}")
    return str(device)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, and what can't go together, whatever the run is. Local.

    Raises:
        ConfigError: names what came, or both.
    """
    zero, stage = config["zero_optimization"], stage_of(config)
    for what, least in (("optimizer", 1), ("param", 3)):
        _check_offload(what, offload_of(config, what), zero, least)
    for option, off in ONLY_STAGE_3.items():
        if stage < 3 and zero.get(option, off) not in (off, AUTO, None):
            raise ConfigError(f"{option}={zero[option]!r} with ZeRO stage {stage}. It needs zero_stage=3.")
    if zero.get("round_robin_gradients", False) not in (False, AUTO):
        raise ConfigError(
            "round_robin_gradients=True: DeepSpeed does not tell then which process has which part of the optimizer's "
            "state, so that it can't be saved. Leave it out."
        )
    for section, name in _COUNTS:
        if (value := (config if section is None else config[section]).get(name, AUTO)) != AUTO:
            check_integer(f"DeepSpeed's config has {name}", value, 1)
    if (norm := config.get("gradient_clipping", AUTO)) != AUTO:
        check_number("DeepSpeed's config has gradient_clipping", norm, least=0)
    if all(config.get(name, {}).get("enabled") is True for name in HALF):
        raise ConfigError("DeepSpeed's config enables both bf16 and fp16. Enable one.")


def _check_section(holder: Mapping[str, Any], name: str, example: str) -> None:
    if not isinstance(holder.get(name, {}), dict):
        raise ConfigError(f"{name}={holder[name]!r:.80} in DeepSpeed's config. Expected a mapping with {example!r}.")


def _check_offload(what: str, device: str, zero: Mapping[str, Any], least: int) -> None:
    stage = zero.get("stage", 0)
    if device != "none" and stage < least:
        raise ConfigError(
            f"offload_{what}={device!r} with ZeRO stage {stage}, which has nothing to offload. Use stage {least} "
            "or higher." if least < 3 else
            f"offload_{what}={device!r} with ZeRO stage {stage}, which keeps whole weights. Use zero_stage=3."
        )  # fmt: skip
    if device == NVME:
        if stage < 3:
            raise ConfigError(f"offload_{what}='nvme' with ZeRO stage {stage}. NVMe needs zero_stage=3; use 'cpu'.")
        if zero[f"offload_{what}"].get("nvme_path") in (None, AUTO, "none"):
            raise ConfigError(f"offload_{what}='nvme' without nvme_path. Give the folder on that device.")


def _text_of(given: str | Path) -> tuple[str, str]:
    """The text of a configuration, and what it is called."""
    text = str(given)
    if text.lstrip().startswith("{"):
        return text, "text"
    with suppress(binascii.Error, ValueError):  # of what is no base64, such as a path
        decoded = base64.b64decode(text, altchars=_ALTERNATIVES if {*"-_"} & {*text} else None, validate=True)
        if decoded.lstrip().startswith(b"{"):
            return decoded.decode("utf-8"), "text in base64"
    path = os.path.expanduser(text)
    if not os.path.isfile(path):
        raise ConfigError(f"DeepSpeed's config {text!r:.200} is no file. Expected the path of a JSON file.")
    try:
        return Path(path).read_text(encoding="utf-8"), repr(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"DeepSpeed's config {path!r} is no text in UTF-8: {error}.") from error


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"DeepSpeed's config {what} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"DeepSpeed's config {what} holds a {type(found).__name__}. Expected a JSON object.")
    return found
