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

_strategies: Registry[Strategy] = Registry(
    Strategy,
    option="strategy",
    built_in={
        DDP: "ddp:DDPStrategy",
        DEEPSPEED: "deepspeed:DeepSpeedStrategy",
        FSDP: "fsdp:FSDPStrategy",
        PIPELINE: "pipeline:PipelineStrategy",
        SINGLE: "single:SingleDeviceStrategy",
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


def create_strategy(spec: StrategyLike, num_processes: int = 1) -> Strategy:
    """The strategy that a word, a mapping `{"name": ..., **options}` or an object names.

    Args:
        spec: the word, the mapping or the object.
        num_processes: what `"auto"` goes by.
    Raises:
        ConfigError: the name or an option is unknown.
    """
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
