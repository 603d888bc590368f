"""`FullyShardedDataParallelPlugin`: the options of FSDP by Accelerate's names, those of its version 1 as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..distributed.environment import read_fsdp
from ..distributed.errors import ConfigError, check_boolean, check_integer
from .fsdp_values import (
    DEFAULT_MIN_NUM_PARAMS,
    policy_word,
    read_claim,
    read_formats,
    read_ignored,
    read_names,
    read_offload,
    read_policy,
    read_sharding,
    read_word,
)
from .fsdp_words import BACKWARD_PREFETCHES, STATE_DICT_TYPES, WRAP_POLICIES
from .wrapping import AUTO, NONE, WrapPolicy, find_units

_VARIABLE_OF = {
    "fsdp_version": "FSDP_VERSION",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
}
"""Fields and the variables that are read where they are None; those that hang together are read in `__post_init__`."""
_FLAGS = (
    "use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing",
    "activation_checkpointing_offload", "cpu_ram_efficient_loading",
)  # fmt: skip
_ALWAYS = {"use_orig_params": True, "sync_module_states": True, "backward_prefetch": "BACKWARD_PRE"}
"""Options of version 1 that can't be chosen, with what is always so."""


@dataclass(slots=True)
class FullyShardedDataParallelPlugin:
    """Options of FSDP, for `Accelerator(fsdp_plugin=...)`; the names are Accelerate's.

    Where a field is None, its variable decides (`FSDP_VARIABLES` in `distributed/environment.py`), else the default
    that is said here. Version 1's fields get the meaning that version 2 has for them; the Accelerator warns once of
    those that were translated or have no effect.

    Raises:
        ConfigError: a field or its variable can't be used, or two contradict each other.
    """

    fsdp_version: Any = None
    """1 or 2: whose words the others are. Both are understood under either, and run torch's `fully_shard`; 2."""
    sharding_strategy: Any = None
    """Version 1's word: `"FULL_SHARD"`, `"SHARD_GRAD_OP"`, `"NO_SHARD"`, `"HYBRID_SHARD"`, `"HYBRID_SHARD_ZERO2"`; its
    number, from 1 on; or torch's `ShardingStrategy`."""
    reshard_after_forward: Any = None
    """Free the weights of a unit after its forward, or a word of `sharding_strategy`; True."""
    backward_prefetch: Any = None
    """Version 1's; the next unit is always gathered ahead in backward."""
    mixed_precision_policy: Any = None
    """In which formats units compute and gradients are reduced: a word for the first, a mapping with `param_dtype`,
    `reduce_dtype` and `output_dtype`, or torch's object. Reductions are in fp32 where it names no format for them.
    None: as the Accelerator's precision is."""
    auto_wrap_policy: Any = None
    """Which modules are units: `"TRANSFORMER_BASED_WRAP"`, `"SIZE_BASED_WRAP"`, `"NO_WRAP"`, classes, or a function of
    a module or as torch's first FSDP calls it. None: by the two fields for it, else `"auto"` of `find_units`."""
    cpu_offload: Any = None
    """Keep parts on the host: a claim, or torch's object; False."""
    ignored_modules: Iterable[nn.Module | str] | str | None = None
    """Modules that stay whole in each process, or a pattern that matches their whole names."""
    state_dict_type: Any = None
    """`"SHARDED_STATE_DICT"` or `"FULL_STATE_DICT"`: in which form checkpoints are; the first."""
    state_dict_config: Any = None
    """Version 1's; without effect."""
    optim_state_dict_config: Any = None
    """Version 1's; without effect."""
    limit_all_gathers: bool = True
    """Version 1's; without effect."""
    use_orig_params: Any = None
    """Version 1's; parameters always keep their names."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """Version 1's; what is on the meta device gets the values of process 0."""
    sync_module_states: Any = None
    """Version 1's; all processes always begin with the weights of process 0."""
    forward_prefetch: Any = None
    """Gather the next unit ahead in forward, in the order in which the model holds them; False."""
    activation_checkpointing: Any = None
    """Units compute their activations again in backward; False."""
    activation_checkpointing_offload: Any = None
    """Keep the inputs of such units on the host until backward; False."""
    cpu_ram_efficient_loading: Any = None
    """Let transformers' `from_pretrained` load weights in one process of each machine alone; False."""
    transformer_cls_names_to_wrap: Any = None
    """The classes of `"TRANSFORMER_BASED_WRAP"`. None: those that the model names in `_no_split_modules`, else the
    layers of its longest list of modules of one class."""
    min_num_params: Any = None
    """From how many parameters on `"SIZE_BASED_WRAP"` makes a module a unit; 100 million. 0: none is."""
    formats: dict[str, str | None] = field(init=False, default_factory=dict, repr=False)
    """The policy's number formats, as `FSDPStrategy` has them."""
    notes: list[str] = field(init=False, default_factory=list, repr=False)
    """What was translated or has no effect."""
    places: dict[str, str] = field(init=False, default_factory=dict, repr=False)
    """The variables that fields were read from, for errors."""

    def __post_init__(self) -> None:
        check_boolean("fsdp_plugin.limit_all_gathers", self.limit_all_gathers)
        for name in ("limit_all_gathers", "param_init_fn", "state_dict_config", "optim_state_dict_config"):
            if getattr(self, name) not in (None, True):
                self.notes.append(f"{name} has no effect")
        self._read_sharding()
        for name, variable in _VARIABLE_OF.items():
            self._take(name, variable)
        self._read_version()
        for name in _FLAGS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, read_claim(self._place(name), value))
        if self.backward_prefetch is not None:
            place = self._place("backward_prefetch")
            self.backward_prefetch = read_word(place, self.backward_prefetch, BACKWARD_PREFETCHES)
        self.cpu_offload = self.cpu_offload is not None and read_offload(self._place("cpu_offload"), self.cpu_offload)
        self.set_state_dict_type(self.state_dict_type)
        self._read_wrap()
        if self.ignored_modules is not None:  # an iterator can be read once
            self.ignored_modules = read_ignored(self._place("ignored_modules"), self.ignored_modules)
        self.set_mixed_precision(self.mixed_precision_policy)
        self._check()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """In which form checkpoints are from now on: whole, or in parts; in parts by default.

        Raises:
            ConfigError: the word is unknown.
        """
        wanted = "SHARDED_STATE_DICT" if state_dict_type is None else state_dict_type
        self.state_dict_type = read_word(self._place("state_dict_type"), wanted, STATE_DICT_TYPES)
        if self.state_dict_type == "LOCAL_STATE_DICT":
            self.notes.append("state_dict_type=LOCAL_STATE_DICT is SHARDED_STATE_DICT")
            self.state_dict_type = "SHARDED_STATE_DICT"

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """In which formats units compute.

        Args:
            mixed_precision: as `mixed_precision_policy`.
            buffer_autocast: Accelerate's; without effect.
            override: replace the policy that was given.
        Raises:
            ConfigError: a format is unknown.
        """
        policy = mixed_precision if override or self.mixed_precision_policy is None else self.mixed_precision_policy
        self.mixed_precision_policy = policy
        self.formats = {} if policy is None else read_formats(self._place("mixed_precision_policy"), policy)
        buffers = self.formats.pop("buffer_dtype", None)
        if buffers not in (None, "fp32"):
            self.notes.append(f"buffer_dtype={buffers} has no effect: buffers keep their formats")

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Check that the policy finds its modules in a model, as `prepare` does by itself.

        Raises:
            ConfigError: the model has no module of a class.
        """
        find_units(model, self.wrap)

    @property
    def wrap(self) -> WrapPolicy:
        """Which modules are units, as `FSDPStrategy(wrap)` takes it. The fields that say it may be set at any time."""
        return self._units()

    def _policy(self) -> Any:
        """The policy: one of `WRAP_POLICIES` where it is a word, else as it is."""
        policy = policy_word(self.auto_wrap_policy)
        if not isinstance(policy, str):
            return policy
        return read_word(self._place("auto_wrap_policy"), policy, WRAP_POLICIES) if policy else None

    def _units(self) -> WrapPolicy:
        """As `wrap`.

        Raises:
            ConfigError: the policy is unknown.
        """
        word = self._policy()
        if word is not None and not isinstance(word, str):
            return read_policy(self._place("auto_wrap_policy"), word)
        if word == "NO_WRAP":
            return NONE
        if word == "SIZE_BASED_WRAP" or (word is None and self.min_num_params is not None):
            return self._least_size() or NONE
        return read_names(self._place("transformer_cls_names_to_wrap"), self.transformer_cls_names_to_wrap) or AUTO

    @property
    def saves_whole(self) -> bool:
        """Whether checkpoints hold whole weights."""
        return bool(self.state_dict_type == "FULL_STATE_DICT")

    def mesh(self, num_processes: int, num_nodes: int) -> tuple[int, int] | None:
        """How many copies of how many parts version 1's word asks for; None for parts over all processes.

        Args:
            num_processes: of all machines.
            num_nodes: how many machines. `"HYBRID_SHARD"` spreads over the processes of each, and averages over them.
        """
        if self.sharding_strategy == "NO_SHARD":
            return num_processes, 1
        is_hybrid = (self.sharding_strategy or "").startswith("HYBRID") and num_nodes > 1
        return (num_nodes, num_processes // num_nodes) if is_hybrid else None

    def options(self, num_processes: int, num_nodes: int) -> dict[str, Any]:
        """The arguments of `FSDPStrategy`, for so many processes on so many machines."""
        return {
            "wrap": self.wrap,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "mesh": self.mesh(num_processes, num_nodes),
            "activation_checkpointing": bool(self.activation_checkpointing),
            "activation_offload": bool(self.activation_checkpointing_offload),
            "prefetch": int(bool(self.forward_prefetch)),
            "ignored_modules": read_ignored(self._place("ignored_modules"), self.ignored_modules),
            "whole_states": self.saves_whole,
            **self.formats,
        }

    def tell_transformers(self) -> None:
        """Set the variables by which transformers' `from_pretrained` learns of `cpu_ram_efficient_loading`."""
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"

    def explanation(self) -> str | None:
        """What was translated or has no effect, in one text; None where nothing was."""
        if not self.notes:
            return None
        return f"fsdp_plugin, options of FSDP's first version: {'; '.join(dict.fromkeys(self.notes))}."

    def _place(self, name: str) -> str:
        """How to call a field in an error: its path, or the variable that it was read from."""
        return self.places.get(name, f"fsdp_plugin.{name}")

    def _take(self, name: str, variable: str) -> None:
        """Read a field that was left open from its variable."""
        if getattr(self, name) is None and (text := read_fsdp(variable)) is not None:
            setattr(self, name, text)
            self.places[name] = variable

    def _read_version(self) -> None:
        version = 2 if self.fsdp_version is None else self.fsdp_version
        if str(version) not in ("1", "2"):
            raise ConfigError(f"{self._place('fsdp_version')}={version!r}. Expected 1 or 2.")
        self.fsdp_version = int(version)

    def _read_sharding(self) -> None:
        """What is freed after forward, and version 1's word, from the fields or the two variables."""
        if self.sharding_strategy is None and self.reshard_after_forward is None:
            # Accelerate's launcher always sets both, the one that its version has no use for to a default.
            is_first = str(self.fsdp_version or read_fsdp("FSDP_VERSION") or 2) == "1"
            if is_first or read_fsdp("FSDP_RESHARD_AFTER_FORWARD") is None:
                self._take("sharding_strategy", "FSDP_SHARDING_STRATEGY")
            if self.sharding_strategy is None:
                self._take("reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD")
        places = self._place("sharding_strategy"), self._place("reshard_after_forward")
        word, frees = read_sharding(self.sharding_strategy, self.reshard_after_forward, places)
        self.sharding_strategy, self.reshard_after_forward = word, frees
        if word is not None:
            self.notes.append(f"sharding_strategy={word} is {_meaning(word, frees)}")

    def _read_wrap(self) -> None:
        """The classes and the size, whose variables count for the policy that they belong to."""
        word = self._policy()
        if word in (None, "TRANSFORMER_BASED_WRAP") and self.min_num_params is None:
            self._take("transformer_cls_names_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP")
        if word == "SIZE_BASED_WRAP":
            self._take("min_num_params", "FSDP_MIN_NUM_PARAMS")
        names = read_names(self._place("transformer_cls_names_to_wrap"), self.transformer_cls_names_to_wrap)
        self.transformer_cls_names_to_wrap = names
        size = None if self.min_num_params is None else self._least_size()
        self.min_num_params = size
        if (names and size is not None) or (names and word not in (None, "TRANSFORMER_BASED_WRAP")):
            raise ConfigError(
                f"fsdp_plugin: transformer_cls_names_to_wrap={names} with auto_wrap_policy={word} and min_num_params="
                f"{size}. Each is a choice of units: give one."
            )
        if size is not None and word not in (None, "SIZE_BASED_WRAP"):
            raise ConfigError(f"fsdp_plugin: min_num_params={size} belongs to SIZE_BASED_WRAP, and not to {word}.")
        self._units()  # an unknown policy is refused here

    def _least_size(self) -> int:
        value = DEFAULT_MIN_NUM_PARAMS if self.min_num_params is None else self.min_num_params
        size = int(value) if isinstance(value, str) and value.isdigit() else value
        check_integer(self._place("min_num_params"), size, 0, "It counts parameters.")
        return int(size)

    def _check(self) -> None:
        for name, always in _ALWAYS.items():
            if (value := getattr(self, name)) not in (None, always):
                self.notes.append(f"{name}={value} has no effect: it is always {always}")
        if self.forward_prefetch:
            self.notes.append("forward_prefetch=True is FSDPStrategy(prefetch=1)")
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            place = self._place("activation_checkpointing_offload")
            raise ConfigError(f"{place}=True needs activation_checkpointing=True. Give both, or none.")


def _meaning(word: str, frees: bool) -> str:
    if word == "NO_SHARD":
        return f"a mesh of copies of one part each, and reshard_after_forward={frees}"
    over = " and a mesh of copies on each machine" if word.startswith("HYBRID") else ""
    return f"reshard_after_forward={frees}{over}"
