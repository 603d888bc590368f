"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ..distributed.errors import ConfigError
from ..distributed.registry import Registry
from .strategy import Strategy

StrategyLike: TypeAlias = "str | Mapping[str, Any] | Strategy"
S = TypeVar("S", bound=type[Strategy])

ENTRY_POINT_GROUP = "loopwright.strategies"
"""Packages that bring a strategy declare it in this group: `word = "package.module:Class"`."""
AUTO = "auto"
"""The word for the strategy that fits how the script was started: `DDP` in several processes, else `SINGLE`."""
SINGLE = "single"
"""The word for one process on one device."""
DDP = "ddp"
"""The word for a copy of the model in each process."""
FSDP = "fsdp"
"""The word for a part of the model in each process."""
DEEPSPEED = "deepspeed"
"""The word for DeepSpeed's ZeRO."""
PIPELINE = "pipeline"
"""The word for some of the layers in each process."""
XLA = "xla"
"""The word for XLA devices, such as TPUs."""
FP8 = "fp8"
"""The word for matrix products in 8 bits, around another strategy: alone, or as in `"fsdp+fp8"`."""

_strategies: Registry[Strategy] = Registry(
    Strategy,
    option="strategy",
    built_in={
        DDP: "ddp:DDPStrategy",
        DEEPSPEED: "deepspeed:DeepSpeedStrategy",
        FP8: "fp8:FP8Strategy",
        FSDP: "fsdp:FSDPStrategy",
        PIPELINE: "pipeline:PipelineStrategy",
        SINGLE: "single:SingleDeviceStrategy",
        XLA: "xla:XLAStrategy",
    },
    package=__package__,
    group=ENTRY_POINT_GROUP,
    reserved=(AUTO,),
)


def register_strategy(name: str) -> Callable[[S], S]:
    """Decorate a `Strategy` class so that `strategy=name` chooses it. Packages use the entry point group instead.

    Raises:
        ConfigError: the name is taken.
    """
    return _strategies.register(name)


def split_fp8(spec: StrategyLike) -> tuple[StrategyLike, dict[str, Any] | None]:
    """What `"fsdp+fp8"` is around, and the options of FP8; None where there is none of it in the word.

    Args:
        spec: as `create_strategy` takes it. In a mapping FP8's options are its `"fp8"`, the others are the inner one's;
            with the name `"fp8"` alone all are FP8's, and `"strategy"` is the inner one.
    Raises:
        ConfigError: the word joins something else, or the options are no mapping.
    """
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    if not isinstance(name, str):
        return spec, None
    inner, joined, last = name.rpartition("+")
    if joined and (last != FP8 or not inner or "+" in inner):
        raise ConfigError(f"strategy={name!r} is unknown. A strategy is joined with 'fp8' alone, as in 'fsdp+fp8'.")
    options = dict(spec) if isinstance(spec, Mapping) else {}
    if not joined:
        if name != FP8:
            return spec, None
        return options.pop("strategy", AUTO), {key: value for key, value in options.items() if key != "name"}
    own = options.pop("fp8", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"strategy={name!r}: fp8={own!r}. Expected a mapping, such as {{'recipe': 'rowwise'}}.")
    return ({**options, "name": inner} if len(options) > 1 else inner), dict(own)


def create_strategy(spec: StrategyLike, num_processes: int = 1) -> Strategy:
    """The strategy that a word, a mapping `{"name": ..., **options}` or an object names.

    Args:
        spec: the word, the mapping or the object.
        num_processes: what `"auto"` goes by.
    Raises:
        ConfigError: the name or an option is unknown.
    """
    spec, fp8 = split_fp8(spec)
    if fp8 is not None:
        return _strategies.create(FP8, {"strategy": create_strategy(spec, num_processes), **fp8})
    if isinstance(spec, Strategy):
        return spec
    options: dict[str, Any] = {}
    name: object = spec
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if name is None:
            raise ConfigError(f"strategy={dict(spec)!r} has no 'name'. Expected such as {{'name': 'single', ...}}.")
    if not isinstance(name, str):
        raise ConfigError(f"strategy={spec!r}. Expected a word, a mapping with 'name', or a Strategy object.")
    if name == AUTO:
        name = DDP if num_processes > 1 else SINGLE
    return _strategies.create(name, options)
