"""Handlers: settings that `Accelerator(kwargs_handlers=[...])` hands on to the object that each is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn

from ..distributed.errors import ConfigError, check_boolean, check_number, suggest
from .communication import Communication, DDPCommunicationHookType

H = TypeVar("H", bound="KwargsHandler")

_DDP_FLAGS = (
    "broadcast_buffers",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)


@dataclass(frozen=True, slots=True)
class KwargsHandler:
    """Base of the settings that an `Accelerator` hands on; the names are Accelerate's."""

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The settings that differ from their defaults, so that the receiver's own defaults stay."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass(frozen=True, slots=True)
class AutocastKwargs(KwargsHandler):
    """Settings of `torch.autocast`, for the forward passes of prepared models and for `Accelerator.autocast`."""

    enabled: bool = True
    """False: forward passes are in the model's own number format."""
    cache_enabled: bool | None = None
    """Keep the converted weights within one forward pass. None: as torch is set."""


@dataclass(frozen=True, slots=True)
class GradScalerKwargs(KwargsHandler):
    """Settings of `torch.amp.GradScaler`, which fp16 works with."""

    init_scale: float = 65536.0
    """The factor of the first loss."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps without an overflow."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by after an overflow."""
    growth_interval: int = 2000
    """Steps without an overflow until the scale grows."""
    enabled: bool = True
    """False: losses are not scaled and no step is dropped."""


@dataclass(frozen=True, slots=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Settings of `DistributedDataParallel`, and how it sends gradients. In one process they have no effect.

    Raises:
        ConfigError: a hook or a wrapper is unknown, or they don't fit each other.
    """

    dim: int = 0
    """The dimension of the samples; torch has no use for it with one device per process."""
    broadcast_buffers: bool = True
    """Give all processes the buffers of process 0 before each forward pass whose gradients are reduced."""
    bucket_cap_mb: float = 25
    """How many MiB of gradients are sent together; a fraction makes smaller buckets."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that have no part in the loss, which is an error otherwise."""
    check_reduction: bool = False
    """Without effect in torch, which warns of it."""
    gradient_as_bucket_view: bool = False
    """Let `.grad` be a view of what is sent: less memory, but gradients can't be detached in place."""
    static_graph: bool = False
    """The same parameters are used in the same way in every step, which saves looking for them."""
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """In which form gradients are sent: `"no"` as they are, `"fp16"`, `"bf16"`, `"power_sgd"`, `"batched_power_sgd"`.
    """
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """`"fp16"` or `"bf16"`: the number format in which the hook gets them."""
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)
    """Options of torch's `PowerSGDState`: `matrix_approximation_rank`, `start_powerSGD_iter`, ..."""

    def __post_init__(self) -> None:
        for name in _DDP_FLAGS:
            check_boolean(f"DistributedDataParallelKwargs({name})", getattr(self, name))
        check_number("DistributedDataParallelKwargs(bucket_cap_mb)", self.bucket_cap_mb, above=0, hint="It is in MiB.")
        self.communication.check()

    @property
    def communication(self) -> Communication:
        """How gradients are sent."""
        return Communication(self.comm_hook, self.comm_wrapper, self.comm_state_option)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `DistributedDataParallel` that differ from their defaults; how gradients are sent is none of
        them.
        """
        # Not super(): a dataclass with slots is a new class, which super() without arguments does not know.
        return {k: v for k, v in KwargsHandler.to_kwargs(self).items() if not k.startswith("comm_")}

    def register_comm_hook(self, model: nn.parallel.DistributedDataParallel) -> Any:
        """Let a model send its gradients in this form; does nothing for `"no"`. Local.

        Returns:
            The state of PowerSGD; None where the form has no state.
        Raises:
            ConfigError: the device can't.
        """
        return self.communication.register(model)


@dataclass(frozen=True, slots=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Settings of `torch.distributed.init_process_group`. In one process they have no effect."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = field(default=None)
    """How long a collective may wait."""


class Handlers:
    """The handlers of one `Accelerator`, at most one of each class.

    Args:
        handlers: in any order.
    Raises:
        ConfigError: one is no handler, or two are of one class.
    """

    def __init__(self, handlers: Iterable[KwargsHandler] | None = None) -> None:
        self._by_class: dict[type[KwargsHandler], KwargsHandler] = {}
        if isinstance(handlers, KwargsHandler) or not isinstance(handlers, Iterable | None):
            raise ConfigError(
                f"kwargs_handlers={handlers!r:.80}. Expected a list of handlers, such as [AutocastKwargs()]."
            )
        for handler in handlers or ():
            self._add(handler)

    def get(self, cls: type[H]) -> H:
        """The handler of a class; one with its defaults where none was given."""
        found = self._by_class.get(cls)
        return found if isinstance(found, cls) else cls()

    def find(self, cls: type[H]) -> H | None:
        """The handler of a class, None where none was given."""
        found = self._by_class.get(cls)
        return found if isinstance(found, cls) else None

    def _add(self, handler: object) -> None:
        known = {cls.__name__ for cls in KwargsHandler.__subclasses__()}
        if not isinstance(handler, KwargsHandler):
            name = handler.__name__ if isinstance(handler, type) else type(handler).__name__
            raise ConfigError(
                f"kwargs_handlers holds {handler!r:.80}, which is no handler object. {suggest(name, known)}"
            )
        if type(handler) in self._by_class:
            raise ConfigError(
                f"kwargs_handlers: You can only pass one {type(handler).__name__}, got "
                f"{self._by_class[type(handler)]} and {handler}. Put the settings into one."
            )
        self._by_class[type(handler)] = handler
