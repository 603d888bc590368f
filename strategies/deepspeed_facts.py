"""DeepSpeed's configuration, completed from what a run knows, and compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from ..distributed.errors import ConfigError
from .deepspeed_config import AUTO, HALF, check_config, stage_of
from .memory_zero import LARGEST_BUCKET

_MANY_STEPS = 2**31
"""Steps between two lines that DeepSpeed prints: none."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run knows that a configuration may leave open."""

    world_size: int
    """Processes that share the batches."""
    num_steps: int
    """Micro-batches per optimizer step."""
    precision: str
    """`"no"`, `"bf16"` or `"fp16"`."""
    device_type: str = "cpu"
    """torch's word for the device."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch in one process; None: unknown."""
    hidden_size: int | None = None
    """The width of the model, where its `config` says so."""
    num_parameters: int = 0
    """Numbers in the model."""
    clip_norm: float = 0.0
    """What `"auto"` means for clipping; 0: no clipping but that which the run asks for."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters for an optimizer of DeepSpeed: lr, betas, ..."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Steps for a scheduler of DeepSpeed: total_num_steps, warmup_num_steps."""


def complete(config: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """A configuration in which nothing is left open, as DeepSpeed takes it. Local.

    Args:
        config: as `read_config` gave it.
        facts: of the run.
    Raises:
        ConfigError: it contradicts the run, names both; or a value is left `"auto"` that nothing tells.
    """
    full = deepcopy(dict(config))
    check_config(full)
    _complete_batches(full, facts)
    _complete_precision(full, facts)
    _complete_zero(full["zero_optimization"], facts)
    if full.get("gradient_clipping", AUTO) == AUTO:
        full["gradient_clipping"] = facts.clip_norm
    steps = {name: value for name, value in facts.schedule.items() if value is not None}  # there are no defaults
    for section, values in (("optimizer", facts.optimizer), ("scheduler", steps)):
        if section in full:
            _fill(full[section].setdefault("params", {}), values)
    full.setdefault("steps_per_print", _MANY_STEPS)
    full.setdefault("zero_allow_untested_optimizer", True)
    full.setdefault("zero_force_ds_cpu_optimizer", False)
    if left := sorted(_auto_paths(full)):
        raise ConfigError(f"DeepSpeed's config leaves {', '.join(left)} 'auto', and nothing tells what to put there.")
    return full


def _complete_batches(config: dict[str, Any], facts: Facts) -> None:
    given = config.get("gradient_accumulation_steps", AUTO)
    if given not in (AUTO, facts.num_steps):
        raise ConfigError(
            f"DeepSpeed's config has gradient_accumulation_steps={given!r}, and the run accumulates {facts.num_steps} "
            "batches (accumulate, gradient_accumulation_steps). Give the number in one place, and 'auto' in the other."
        )
    config["gradient_accumulation_steps"] = facts.num_steps
    per_step = facts.num_steps * facts.world_size
    micro, total = (config.get(name, AUTO) for name in ("train_micro_batch_size_per_gpu", "train_batch_size"))
    if micro == AUTO:
        micro = (facts.micro_batch_size or 1) if total == AUTO else total // per_step
    if total != AUTO and total != micro * per_step:
        raise ConfigError(
            f"DeepSpeed's config has train_batch_size={total!r}, but {micro} samples per batch and process, "
            f"{facts.num_steps} batches per step and {facts.world_size} processes make {micro * per_step}. Use 'auto'."
        )
    config["train_micro_batch_size_per_gpu"], config["train_batch_size"] = micro, micro * per_step


def _complete_precision(config: dict[str, Any], facts: Facts) -> None:
    stage = stage_of(config)
    for name in HALF:
        wanted = facts.precision == name
        given = config.get(name, {}).get("enabled", AUTO)
        if given != AUTO and given is not wanted:
            raise ConfigError(
                f"DeepSpeed's config has {name} enabled={given!r}, and the run's precision is {facts.precision!r}. "
                "Give it in one place, and 'auto' in the other."
            )
        # Without partitions there are no weights in 32 bits beside those in 16: autocast serves.
        if wanted and stage == 0 and name == "fp16":
            raise ConfigError("precision='fp16' with ZeRO stage 0. Use stage 1 to 3, or strategy='ddp'.")
        if wanted and name == "fp16" and facts.device_type == "cpu" and not computes_in_half():
            raise ConfigError(
                "precision='fp16': DeepSpeed computes in it only on a CPU with instructions for it (avx512_fp16), "
                "which this one lacks. Use 'bf16' or 'no'."
            )
        if wanted and stage > 0:
            config[name] = config.get(name, {}) | {"enabled": True}
        else:
            config.pop(name, None)
    for name in config.keys() & HALF:
        for key in [key for key, value in config[name].items() if value == AUTO]:
            del config[name][key]


def computes_in_half() -> bool:
    """Whether DeepSpeed takes this CPU for one that computes in fp16."""
    operators: Any = torch.ops.mkldnn
    return hasattr(operators, "_is_mkldnn_fp16_supported") and bool(operators._is_mkldnn_fp16_supported())


def _complete_zero(zero: dict[str, Any], facts: Facts) -> None:
    hidden = facts.hidden_size
    sizes = {
        "reduce_bucket_size": hidden and hidden * hidden,
        "stage3_prefetch_bucket_size": hidden and int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": hidden and 10 * hidden,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    _fill(zero, sizes)
    zero.setdefault("reduce_bucket_size", max(1, min(LARGEST_BUCKET, facts.num_parameters)))
    for what in ("optimizer", "param"):
        section = zero.get(f"offload_{what}")
        if section is None or section.get("device", "none") in (AUTO, "none"):
            zero.pop(f"offload_{what}", None)
            continue
        if facts.device_type == "cpu":
            if section.get("pin_memory") is True:
                raise ConfigError(
                    f"offload_{what} has pin_memory=True, which needs an accelerator, and this run is on the CPU. "
                    "Leave it out, or use 'auto'."
                )
            section["pin_memory"] = False
        _fill(section, {"pin_memory": facts.device_type != "cpu"})
    size = zero.get("zero_hpz_partition_size", 1)
    if size not in (AUTO, 1) and facts.world_size % size:
        raise ConfigError(
            f"zero_hpz_partition_size={size!r} does not divide the {facts.world_size} processes. Use the number of "
            "processes on a machine."
        )
    _fill(zero, {"zero_hpz_partition_size": 1})


def _fill(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values where a section has `"auto"`; None leaves it to DeepSpeed's default."""
    for name, value in values.items():
        if section.get(name) == AUTO:
            if value is None:
                del section[name]
            else:
                section[name] = value


def _auto_paths(section: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _auto_paths(value, f"{path}{name}.")
        elif value == AUTO:
            yield f"{path}{name}"
