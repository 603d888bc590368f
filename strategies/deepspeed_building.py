"""Models that are built in parts (zero.Init), and what is to be known of parameters that are in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..distributed.errors import ConfigError, suggest
from ..distributed.process import ProcessState
from .deepspeed_limits import check_readable
from .deepspeed_nvme import check_nvme
from .deepspeed_package import connect_deepspeed, launched


@contextmanager
def building(deepspeed: Any, config: Mapping[str, Any], process: ProcessState) -> Iterator[None]:
    """A context in which each module that is made keeps a part of its weights alone. Collective.

    Args:
        deepspeed: the package.
        config: complete.
        process: this one.
    Raises:
        ConfigError: DeepSpeed refuses the configuration.
    """
    connect_deepspeed(deepspeed, process.device)
    check_readable(deepspeed, config)
    check_nvme(config)
    with launched(process.local_process_index), deepspeed.zero.Init(config_dict_or_path=dict(config)):
        yield


@contextmanager
def known_shapes(model: nn.Module) -> Iterator[None]:
    """A context in which parameters that are in parts have their whole shapes, and no values. Local.

    An optimizer may be made in it whose groups go by shapes, as those that decay matrices alone do.
    """
    shapes = {parameter: vars(parameter).get("ds_shape", parameter.shape) for parameter in model.parameters()}
    spread = [(parameter, parameter.data) for parameter, shape in shapes.items() if shape != parameter.shape]
    for parameter, data in spread:
        parameter.data = data.new_zeros(()).expand(shapes[parameter])
    try:
        yield
    finally:
        for parameter, data in spread:
            parameter.data = data


def find_leaves(model: nn.Module, names: Sequence[str]) -> list[type[nn.Module]]:
    """The classes of these names among a model's modules. Local.

    Raises:
        ConfigError: the model has no module of a class; lists those that it has.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in classes:
            raise ConfigError(
                f"moe_leaf_modules has {name!r}, and {type(model).__name__} no such module. {suggest(name, classes)}"
            )
    return [classes[name] for name in names]


def hidden_size_of(model: nn.Module) -> int | None:
    """The width of a model, as its `config` says it; None where it does not. Local."""
    config = getattr(model, "config", None)
    for found in (config, getattr(config, "text_config", None)):
        sizes = [getattr(found, "hidden_size", None), *(getattr(found, "hidden_sizes", None) or ())]
        if numbers := [size for size in sizes if isinstance(size, int)]:
            return max(numbers)
    return None
