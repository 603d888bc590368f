"""The options of `DeepSpeedStrategy`, put into DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..distributed.errors import ConfigError, check_boolean, check_number, suggest
from .deepspeed_config import (
    AUTO,
    DEFAULT_STAGE,
    DEVICES,
    OFFLOADS,
    ONLY_STAGE_3,
    ConfigLike,
    check_config,
    read_config,
    stage_of,
)
from .deepspeed_nvme import check_transfers

_ZERO_OPTIONS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)
"""DeepSpeed's options that can be given by themselves; all others stand in a configuration."""
_KNOWN = ("zero_stage", *OFFLOADS, *_ZERO_OPTIONS, "config", "zero3_init", "moe_leaf_modules", "clip_norm")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """What DeepSpeed is to do."""

    config: dict[str, Any]
    """DeepSpeed's configuration, in which values may be `"auto"` until a model is set up."""
    zero3_init: bool
    """Whether models are built in parts."""
    moe_leaf_modules: tuple[str, ...]
    """Names of module classes that stage 3 gathers as a whole."""
    clip_norm: float
    """The largest norm of gradients where the run asks for none; 0: no limit."""

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return stage_of(self.config)

    def given(self, stage: int) -> dict[str, Any]:
        """The same options as `DeepSpeedStrategy` takes them beside another `zero_stage`; those alone that it has."""
        rest = {name: value for name, value in self.config.items() if name != "zero_optimization"}
        zero = {
            name: value
            for name, value in self.config["zero_optimization"].items()
            if name != "stage" and (stage == 3 or name not in ONLY_STAGE_3)
        }
        is_plain = not rest and all(name in _ZERO_OPTIONS for name in zero)
        found: dict[str, Any] = zero if is_plain else {"config": {**rest, "zero_optimization": zero}}
        if stage == 3 and self.zero3_init:
            found["zero3_init"] = True
        if self.moe_leaf_modules:
            found["moe_leaf_modules"] = list(self.moe_leaf_modules)
        if self.clip_norm:
            found["clip_norm"] = self.clip_norm
        return found


def read_options(
    config: ConfigLike | None = None,
    *,
    zero_stage: int | None = None,
    zero3_init: bool = False,
    moe_leaf_modules: Sequence[str] = (),
    clip_norm: float | None = None,
    **zero: Any,
) -> DeepSpeedOptions:
    """The options, which `DeepSpeedStrategy` explains, with a configuration in which they stand. Local.

    Raises:
        ConfigError: an option is unknown, can't be used, or contradicts another or the configuration.
    """
    check_boolean("DeepSpeedStrategy(zero3_init)", zero3_init)
    is_list = isinstance(moe_leaf_modules, Sequence) and not isinstance(moe_leaf_modules, str)
    if not is_list or not all(isinstance(name, str) for name in moe_leaf_modules):
        raise ConfigError(f"DeepSpeedStrategy(moe_leaf_modules={moe_leaf_modules!r:.80}). Expected a list of names.")
    for name, value in zero.items():
        if name not in (*OFFLOADS, *_ZERO_OPTIONS):
            raise ConfigError(f"DeepSpeedStrategy({name}={value!r:.80}) is unknown. {suggest(name, _KNOWN)}")
    full: dict[str, Any] = {"zero_optimization": {"stage": DEFAULT_STAGE}} if config is None else read_config(config)
    for name, value in {"stage": zero_stage, **zero}.items():
        if value is not None:
            _put(full["zero_optimization"], name, value, is_default=config is None)
    if clip_norm is not None:
        check_number("DeepSpeedStrategy(clip_norm)", clip_norm, above=0)
        if full.get("gradient_clipping", AUTO) not in (AUTO, clip_norm):
            raise ConfigError(
                f"DeepSpeedStrategy(clip_norm={clip_norm}), and its config has gradient_clipping="
                f"{full['gradient_clipping']!r}. Give it in one place."
            )
    check_config(full)
    check_transfers(full)
    if zero3_init and stage_of(full) != 3:
        raise ConfigError(f"zero3_init=True with ZeRO stage {stage_of(full)}. It needs zero_stage=3.")
    return DeepSpeedOptions(
        config=full, zero3_init=zero3_init, moe_leaf_modules=tuple(moe_leaf_modules), clip_norm=clip_norm or 0.0
    )


def _put(section: dict[str, Any], name: str, value: Any, *, is_default: bool) -> None:
    """Put an option into a configuration's section, unless the user's own has another value there."""
    wanted = _offload(name, value) if name in OFFLOADS else value
    given = section.get(name, AUTO)
    if not is_default and given not in (AUTO, wanted):
        option = "zero_stage" if name == "stage" else name
        raise ConfigError(
            f"DeepSpeedStrategy({option}={value!r}), and its config has {name}={given!r}. Give it in one place."
        )
    section[name] = wanted


def _offload(name: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        if value not in DEVICES:
            raise ConfigError(f"DeepSpeedStrategy({name}={value!r}) is unknown. {suggest(value, DEVICES)}")
        return {"device": value, "pin_memory": AUTO}
    if not isinstance(value, Mapping) or "device" not in value:
        expected = "Expected 'cpu', 'nvme', or a mapping with 'device'."
        raise ConfigError(f"DeepSpeedStrategy({name}={value!r:.80}). {expected}")
    return {"pin_memory": AUTO, **value}
