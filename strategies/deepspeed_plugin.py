"""`DeepSpeedPlugin`: the options of DeepSpeed by Accelerate's names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..distributed.environment import read_flag, read_text, read_variable
from ..distributed.errors import ConfigError, check_boolean, check_integer, check_number
from ..distributed.imports import is_installed, require
from .deepspeed_config import AUTO, DEFAULT_STAGE, read_config

_ACCELERATES_CLIP_NORM = 1.0
"""What `"auto"` means for clipping in Accelerate."""
_OF_CONFIG = {
    "zero_stage": "stage",
    "offload_optimizer_device": "offload_optimizer.device",
    "offload_param_device": "offload_param.device",
    "offload_optimizer_nvme_path": "offload_optimizer.nvme_path",
    "offload_param_nvme_path": "offload_param.nvme_path",
    "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save",
}
"""Fields and their places in the configuration's section `zero_optimization`."""
_VARIABLES = {
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "hf_ds_config": "DEEPSPEED_CONFIG_FILE",
    "transformer_moe_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_FLAGS = {"zero3_init_flag": "DEEPSPEED_ZERO3_INIT", "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"}
_NUMBERS = {"gradient_accumulation_steps": int, "gradient_clipping": float, "zero_stage": int}


class HfDeepSpeedConfig:
    """A configuration with Accelerate's ways to ask it.

    Args:
        config_file_or_dict: as `read_config` takes it.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = read_config(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that a dotted path names, None where there is none, and the key in it."""
        *path, key = ds_key_long.split(".")
        section: Any = self.config
        for name in path:
            section = section.get(name)
            if not isinstance(section, dict):
                return None, key
        return section, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a dotted path."""
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted path is left open."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether there is a value at a dotted path, and it is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether there is a value at a dotted path, and it is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients are spread, and weights not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether weights are spread."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or weights are on the host or on NVMe."""
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)


@dataclass
class DeepSpeedPlugin:
    """Options of DeepSpeed, for `Accelerator(deepspeed_plugin=...)`; the names are Accelerate's.

    Where a field is None, its variable decides (`ACCELERATE_DEEPSPEED_...`), else the configuration, else the default.

    Raises:
        ConfigError: a field or its variable can't be used, or contradicts the configuration.
    """

    hf_ds_config: Any = None
    """DeepSpeed's configuration: the path of a JSON file, JSON in base64, a mapping, or an `HfDeepSpeedConfig`."""
    gradient_accumulation_steps: Any = None
    """Micro-batches per optimizer step; `"auto"`: those of the Accelerator."""
    gradient_clipping: Any = None
    """The largest norm of gradients; `"auto"`: 1."""
    zero_stage: Any = None
    """0 to 3; 2."""
    is_train_batch_min: bool = True
    """Without effect: the first loader's batch size is written into the configuration."""
    offload_optimizer_device: Any = None
    """`"none"`, `"cpu"` or `"nvme"`."""
    offload_param_device: Any = None
    """`"none"`, `"cpu"` or `"nvme"`; at stage 3."""
    offload_optimizer_nvme_path: Any = None
    """The folder on the NVMe device."""
    offload_param_nvme_path: Any = None
    """The folder on the NVMe device."""
    zero3_init_flag: Any = None
    """Build models in parts: what `Task.configure_model` makes, and what transformers' `from_pretrained` loads; at
    stage 3 the default."""
    zero3_save_16bit_model: Any = None
    """Give whole weights in 16 bits."""
    transformer_moe_cls_names: Any = None
    """Classes that stage 3 gathers as a whole, with commas between them."""
    enable_msamp: Any = None
    """MS-AMP is not available."""
    msamp_opt_level: Any = None
    """MS-AMP is not available."""

    def __post_init__(self) -> None:
        check_boolean("deepspeed_plugin.is_train_batch_min", self.is_train_batch_min)
        if self.enable_msamp:
            raise ConfigError("deepspeed_plugin.enable_msamp=True: MS-AMP is not available. Leave it out.")
        given = {name for name in (*_OF_CONFIG, *_VARIABLES) if getattr(self, name) is not None}
        told = _fields_of_launch() - given
        self._read_variables()
        self._check_fields()
        if isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            config = self.hf_ds_config.config
        elif self.hf_ds_config in (None, "none"):
            config = None
        else:
            config = HfDeepSpeedConfig(self.hf_ds_config).config
        self._has_file = config is not None
        self.hf_ds_config = HfDeepSpeedConfig(
            self._own_config() if config is None else self._completed(config, given, told)
        )
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        """DeepSpeed's configuration, in which values may be `"auto"`."""
        self._read_back()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn("zero3_init_flag=True has no effect below ZeRO stage 3.", stacklevel=3)
            self.zero3_init_flag = False

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a dotted path of the configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted path of the configuration is left open."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are built in parts."""
        return bool(self.zero3_init_flag)

    @property
    def precision(self) -> str | None:
        """The number format that the configuration enables, None where it leaves that open."""
        return next((name for name in ("bf16", "fp16") if self.get_value(f"{name}.enabled") is True), None)

    def options(self) -> dict[str, Any]:
        """The arguments of `DeepSpeedStrategy`."""
        names = self.transformer_moe_cls_names or ""
        is_open = self.deepspeed_config.get("gradient_clipping") == AUTO
        return {
            "config": self.deepspeed_config,
            "zero3_init": bool(self.zero3_init_flag),
            "moe_leaf_modules": [name.strip() for name in names.split(",") if name.strip()],
            "clip_norm": _ACCELERATES_CLIP_NORM if is_open else None,
        }

    def tell_transformers(self) -> None:
        """Let transformers' `from_pretrained` build models in parts, if it is installed. Local."""
        if not self.zero3_init_flag or not is_installed("transformers"):
            return
        integrations: Any = require("transformers.integrations", extra="deepspeed", purpose="zero3_init_flag=True")
        config = {name: value for name, value in self.deepspeed_config.items() if value != AUTO}
        self._kept_alive = integrations.HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})

    def _read_variables(self) -> None:
        for name, variable in _VARIABLES.items():
            if getattr(self, name) is None and (found := read_variable(variable)) is not None:
                setattr(self, name, _number(found[0], found[1], _NUMBERS.get(name)))
        for name, variable in _FLAGS.items():
            if getattr(self, name) is None:
                setattr(self, name, read_flag(variable))

    def _check_fields(self) -> None:
        if self.gradient_accumulation_steps not in (None, AUTO):
            check_integer("deepspeed_plugin.gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        if self.gradient_clipping not in (None, AUTO):
            check_number("deepspeed_plugin.gradient_clipping", self.gradient_clipping, least=0)
        if not isinstance(self.transformer_moe_cls_names or "", str):
            raise ConfigError(
                f"deepspeed_plugin.transformer_moe_cls_names={self.transformer_moe_cls_names!r:.80}. Expected a text "
                "with commas between the names."
            )

    def _own_config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": DEFAULT_STAGE if self.zero_stage is None else self.zero_stage}
        for what in ("optimizer", "param"):
            device = getattr(self, f"offload_{what}_device") or "none"
            zero[f"offload_{what}"] = {"device": device, "pin_memory": AUTO}
            if device == "nvme":
                zero[f"offload_{what}"]["nvme_path"] = getattr(self, f"offload_{what}_nvme_path")
        zero["stage3_gather_16bit_weights_on_model_save"] = bool(self.zero3_save_16bit_model)
        return {
            "gradient_accumulation_steps": AUTO
            if self.gradient_accumulation_steps is None
            else self.gradient_accumulation_steps,
            "gradient_clipping": AUTO if self.gradient_clipping is None else self.gradient_clipping,
            "zero_optimization": zero,
        }

    def _completed(self, config: Mapping[str, Any], given: set[str], told: set[str]) -> dict[str, Any]:
        """The user's configuration, whose `"auto"` values are filled from the fields.

        Args:
            config: the user's.
            given: the fields that were given here.
            told: those that the launcher's file has.
        """
        full = HfDeepSpeedConfig(config)
        full.config.setdefault("gradient_accumulation_steps", 1)
        places = {name: f"zero_optimization.{path}" for name, path in _OF_CONFIG.items()}
        places |= {name: name for name in ("gradient_accumulation_steps", "gradient_clipping")}
        for name, path in places.items():
            value = DEFAULT_STAGE if name == "zero_stage" and self.zero_stage is None else getattr(self, name)
            section, key = full.find_config_node(path)
            if name in told:
                _check_told(name, value, path, AUTO if section is None else section.get(key))
            if value is None or section is None or key not in section:
                continue
            if section[key] == AUTO:
                section[key] = value
            elif name in given and section[key] != value and value != AUTO:
                raise ConfigError(
                    f"deepspeed_plugin.{name}={value!r}, and its configuration has {path}={section[key]!r}. Give it in "
                    "one place."
                )
        return full.config

    def _read_back(self) -> None:
        """Let the fields say what the configuration says."""
        for name, path in _OF_CONFIG.items():
            value = self.get_value(f"zero_optimization.{path}")
            setattr(self, name, getattr(self, name) if value in (None, AUTO) else value)
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            setattr(self, name, self.get_value(name, AUTO))


def _number(place: str, text: str, kind: Any) -> Any:
    if kind is None or text == AUTO:
        return text
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{place}={text!r} is no number. Expected one, or 'auto'.") from error


def _fields_of_launch() -> set[str]:
    """The fields that the launcher's file of options has, as against its command line and its defaults."""
    return {name.strip() for name in (read_text("CONFIG_DS_FIELDS") or "").split(",")}


def _check_told(name: str, value: Any, path: str, configured: Any) -> None:
    """Refuse an option of the launcher's file that DeepSpeed's own configuration does not follow.

    Raises:
        ConfigError: names both.
    """
    if configured == AUTO or value in (configured, AUTO) or (configured is None and value in (None, False, "none")):
        return
    there = f"has no {path}" if configured is None else f"has {path}={configured!r}"
    raise ConfigError(
        f"the launcher's file has {name}={value!r}, and DeepSpeed's configuration, which counts, {there}. Give it "
        "there, as the value or as 'auto', and take it out of the launcher's file otherwise."
    )
