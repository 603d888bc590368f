"""Values of Accelerate's FSDP plugin, in each of the forms that it takes, as `FSDPStrategy` has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..distributed.environment import read_boolean
from ..distributed.errors import ConfigError, suggest
from .fsdp_words import FREEING, SHARDING_STRATEGIES, WRAP_POLICIES
from .wrapping import WrapPolicy

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""From how many parameters on `SIZE_BASED_WRAP` makes a module a unit, where nobody says it."""
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_POLICY_KEYS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def read_word(option: str, value: object, words: Sequence[str]) -> str:
    """A word, its number as torch counts it, or the member of torch's enumeration, as the word. Local.

    Raises:
        ConfigError: it is none of the words.
    """
    name = value.name if isinstance(value, Enum) else str(value).strip()
    word = name.upper().removeprefix("_")  # torch's HYBRID_SHARD_ZERO2 is a private name
    if word.isdigit() and 1 <= int(word) <= len(words) and not isinstance(value, bool):
        return words[int(word) - 1]
    if word not in words:
        raise ConfigError(f"{option}={value!r} is unknown. {suggest(word, words)}")
    return word


def read_claim(option: str, value: object) -> bool:
    """True or False, or a text that means one of them. Local.

    Raises:
        ConfigError: it is neither.
    """
    claim = read_boolean(value) if isinstance(value, str) else value
    if not isinstance(claim, bool):
        raise ConfigError(f"{option}={value!r}. Expected True or False.")
    return claim


def read_sharding(word: object, frees: object, places: tuple[str, str]) -> tuple[str | None, bool]:
    """Version 1's word, None where none was given, and whether units are freed after their forward. Local.

    Args:
        word: as version 1 has it, or None.
        frees: as version 2 has it, or None, or a word of version 1 as well.
        places: what to call both in an error.
    Raises:
        ConfigError: one can't be read, or they contradict each other.
    """
    found = None if word is None else read_word(places[0], word, SHARDING_STRATEGIES)
    claim = frees if isinstance(frees, bool) else read_boolean(str(frees))
    if frees is not None and claim is None:
        other = read_word(places[1], frees, SHARDING_STRATEGIES)
        if found not in (None, other):
            raise ConfigError(f"{places[0]}={found} and {places[1]}={other} contradict each other. Give one of them.")
        found = other
    if found is None:
        return None, claim is not False
    meant = found in FREEING
    if claim is not None and claim != meant:
        raise ConfigError(f"{places[0]}={found} says {places[1]}={meant}, and {claim} was given. Give one of them.")
    return found, meant


def read_offload(option: str, value: object) -> bool:
    """Whether weights are kept on the host: a claim, or torch's object for it. Local.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, (bool, str)):
        return read_claim(option, value)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy  # here: it takes long

    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, OffloadPolicy):
        return isinstance(value, CPUOffloadPolicy)
    raise ConfigError(f"{option}={value!r:.80}. Expected True, False, or torch's CPUOffloadPolicy().")


def read_formats(option: str, policy: object) -> dict[str, str | None]:
    """Number formats of parameters, reductions, outputs and buffers, as far as a policy names them. Local.

    Args:
        option: its name for errors.
        policy: a word for the parameters, a mapping, or torch's object of either version.
    Returns:
        Some of `param_dtype`, `reduce_dtype`, `output_dtype`, `buffer_dtype`, each `"fp32"`, `"bf16"`, `"fp16"` or
        None.
    Raises:
        ConfigError: a key or a format is unknown.
    """
    if isinstance(policy, (str, torch.dtype)):
        return {"param_dtype": read_format(option, policy)}
    if not isinstance(policy, Mapping):
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy  # here: it takes long

        if not isinstance(policy, (MixedPrecision, MixedPrecisionPolicy)):
            raise ConfigError(
                f"{option}={policy!r:.80}. Expected 'bf16', 'fp16', 'fp32', a mapping with param_dtype and "
                "reduce_dtype, or torch's MixedPrecisionPolicy(...)."
            )
        policy = {key: getattr(policy, key) for key in _POLICY_KEYS if hasattr(policy, key)}
    for key in policy:
        if key not in _POLICY_KEYS:
            raise ConfigError(f"{option} holds {key!r}, which is unknown. {suggest(key, _POLICY_KEYS)}")
    return {key: None if value is None else read_format(f"{option}[{key!r}]", value) for key, value in policy.items()}


def read_format(option: str, value: object) -> str:
    """A number format as the word for it, from a word or torch's own. Local.

    Raises:
        ConfigError: it is another.
    """
    word = str(value).removeprefix("torch.").lower()
    if word not in _FORMATS:
        hint = " fp8 is not available in this version." if word == "fp8" else ""
        raise ConfigError(f"{option}={value!r} is unknown. {suggest(word, ('fp32', 'bf16', 'fp16'))}{hint}")
    return _FORMATS[word]


def read_names(option: str, value: object) -> list[str] | None:
    """Names of classes, from a list of them or of the classes, or from a text with commas. Local.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()] or None
    if not isinstance(value, Iterable):
        raise ConfigError(f"{option}={value!r:.80}. Expected names of classes: ['Block'], or 'Block,Embedding'.")
    return [each.__name__ if isinstance(each, type) else str(each) for each in value] or None


def read_ignored(option: str, value: object) -> list[str | nn.Module]:
    """Modules that stay whole: a pattern of their names, or a list of modules and patterns. Local.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return []
    found = [value] if isinstance(value, (str, nn.Module)) else value
    listed = list(found) if isinstance(found, Iterable) else []
    if not isinstance(found, Iterable) or not all(isinstance(each, (str, nn.Module)) for each in listed):
        raise ConfigError(f"{option}={value!r:.80}. Expected modules, or a pattern that matches their whole names.")
    return listed


def read_policy(option: str, policy: object) -> WrapPolicy:
    """Which modules are units, from a policy that is no word: a function, also one of torch's first FSDP, or classes.

    Local.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(policy, (list, tuple, set, frozenset)) and all(isinstance(each, (str, type)) for each in policy):
        return list(policy)
    if not callable(policy):
        raise ConfigError(f"{option}={policy!r:.80}. Expected a word ({', '.join(WRAP_POLICIES)}) or a function.")
    if isinstance(policy, type):
        return policy
    return _of_first_version(policy) if _is_of_first_version(policy) else policy


def _is_of_first_version(policy: Callable[..., Any]) -> bool:
    """Whether a function is called as torch's first FSDP calls it: with a module, a claim and a number."""
    try:
        inspect.signature(policy).bind(module=None, recurse=False, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def _of_first_version(policy: Callable[..., Any]) -> WrapPolicy:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy  # here: it takes long

    keywords = policy.keywords if isinstance(policy, functools.partial) else {}
    inner = policy.func if isinstance(policy, functools.partial) else policy
    if inner is size_based_auto_wrap_policy and set(keywords) <= {"min_num_params"}:
        return int(keywords.get("min_num_params", DEFAULT_MIN_NUM_PARAMS))

    def chooses(module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return chooses


def policy_word(policy: Any) -> Any:
    """The word for one of torch's two policies without settings; else the policy as it is. Local."""
    if not inspect.isfunction(policy):
        return policy
    from torch.distributed.fsdp import wrap  # here: it takes long

    words: dict[Any, str] = {
        wrap.transformer_auto_wrap_policy: "TRANSFORMER_BASED_WRAP",
        wrap.size_based_auto_wrap_policy: "SIZE_BASED_WRAP",
    }
    return words.get(policy, policy)
