"""In which form DDP sends gradients: compressed hooks, their wrappers, and the options of PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from ..distributed.errors import ConfigError, suggest


class Bucket(Protocol):
    """Gradients that DDP sends together, as its hooks get them."""

    def buffer(self) -> Tensor:
        """All of them, flat."""

    def set_buffer(self, buffer: Tensor, /) -> None:
        """Put another tensor in the place of that."""

    def gradients(self) -> list[Tensor]:
        """Each in its shape; they share their memory with `buffer()`."""

    def index(self) -> int:
        """Which bucket of the model this is."""

    def is_last(self) -> bool:
        """Whether it is the last bucket of a reduction."""


Hook: TypeAlias = Callable[[Any, Bucket], Future[Tensor]]
"""Gets its state and a bucket of gradients; gives the future of their mean over processes."""


class DDPCommunicationHookType(StrEnum):
    """The forms in which gradients are sent; the names are Accelerate's."""

    NO = "no"
    """As they are."""
    FP16 = "fp16"
    """In 16 bits: range up to 65504."""
    BF16 = "bf16"
    """In 16 bits: the range of fp32 with 8 bits of precision."""
    POWER_SGD = "power_sgd"
    """As products of thin matrices, one per parameter, once `start_powerSGD_iter` reductions have passed."""
    BATCHED_POWER_SGD = "batched_power_sgd"
    """The same with one matrix per bucket: faster, less accurate."""


_FORMATS = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
_POWERS = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass(frozen=True, slots=True)
class Communication:
    """How DDP sends gradients; `check` before use."""

    hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """The form."""
    wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """`"fp16"` or `"bf16"`: the number format in which the hook gets them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of torch's `PowerSGDState`."""

    def check(self) -> None:
        """Refuse what can't be sent in this way.

        Raises:
            ConfigError: a word is unknown, or hook, wrapper and options don't fit each other.
        """
        hook = _read("comm_hook", self.hook, list(DDPCommunicationHookType))
        wrapper = _read("comm_wrapper", self.wrapper, [DDPCommunicationHookType.NO, *_FORMATS])
        if wrapper is not DDPCommunicationHookType.NO and hook is DDPCommunicationHookType.NO:
            raise ConfigError(
                f"comm_wrapper='{wrapper}' has no hook to wrap. Give comm_hook as well; comm_hook='{wrapper}' alone "
                "sends in that format."
            )
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"comm_state_option={self.options!r}. Expected a mapping of options of PowerSGD.")
        if self.options and hook not in _POWERS:
            given = ", ".join(map(str, self.options))
            raise ConfigError(
                f"comm_state_option has {given}, but comm_hook='{hook}' has no options. Use comm_hook='power_sgd', or "
                "leave them out."
            )

    @property
    def is_plain(self) -> bool:
        """Whether gradients are sent as they are, by DDP itself."""
        return DDPCommunicationHookType(self.hook) is DDPCommunicationHookType.NO

    def register(self, model: nn.parallel.DistributedDataParallel) -> Any:
        """Let a model send its gradients in this form. Local.

        Returns:
            The state of PowerSGD; None where the form has no state.
        Raises:
            ConfigError: an option is unknown or out of range, or the device can't.
        """
        if self.is_plain:
            return None
        kind = DDPCommunicationHookType(self.hook)
        state = _power_state(model, self.options) if kind in _POWERS else model.process_group
        hook = _hook_of(kind)
        wrapper = DDPCommunicationHookType(self.wrapper)
        if wrapper is not DDPCommunicationHookType.NO:
            hook = in_format(_FORMATS[wrapper], hook)
        # Without annotations: torch compares them with its classes, and ours are texts.
        model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
        return state if kind in _POWERS else None


def compressing(dtype: torch.dtype) -> Hook:
    """A hook that sends gradients in a shorter number format.

    torch has such hooks as well, but refuses its bf16 one where there is no NCCL; gloo sums bf16 as it does fp16.
    """

    def compressed_mean(group: dist.ProcessGroup, bucket: Bucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        # Divided before it is summed, so that the sum stays in the range of the format.
        short = buffer.to(dtype).div_(group.size())

        def restore(future: Future[list[Tensor]]) -> Tensor:
            short_mean: Tensor = future.value()[0]
            return buffer.copy_(short_mean)

        future: Future[Tensor] = dist.all_reduce(short, group=group, async_op=True).get_future().then(restore)
        return future

    return compressed_mean


def in_format(dtype: torch.dtype, hook: Hook) -> Hook:
    """A hook that gets its bucket in a shorter number format, and whose result is brought back."""

    def wrapped(state: Any, bucket: Bucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))

        def restore(future: Future[Tensor]) -> Tensor:
            mean: Tensor = future.value()
            return buffer.copy_(mean)

        return hook(state, bucket).then(restore)

    return wrapped


class SquareBucket:
    """A bucket as PowerSGD's hook reads it, with one square matrix in place of its gradients.

    Args:
        bucket: DDP's own; its gradients are copied, and zeros fill the square.
    """

    def __init__(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        side = math.isqrt(buffer.numel() - 1) + 1
        self._bucket = bucket
        self._square = buffer.new_zeros(side, side)
        self._square.view(-1)[: buffer.numel()].copy_(buffer)

    def buffer(self) -> Tensor:
        """All of the square, flat."""
        return self._square.view(-1)

    def gradients(self) -> list[Tensor]:
        """The square, which shares its memory with `buffer()`."""
        return [self._square]

    def index(self) -> int:
        """Which bucket of the model this is."""
        return self._bucket.index()

    def is_last(self) -> bool:
        """Whether it is the last bucket of a reduction."""
        return self._bucket.is_last()


def batched_power_sgd(state: Any, bucket: Bucket) -> Future[Tensor]:
    """PowerSGD over one square matrix per bucket.

    torch's own hook for this fails an assertion on every backend: it orthogonalises a matrix with a function for
    batches of matrices. Its other hook, given a bucket with one square matrix, does the same.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    buffer = bucket.buffer()

    def cut(future: Future[Tensor]) -> Tensor:
        mean: Tensor = future.value()[: buffer.numel()]
        return buffer.copy_(mean)

    square: Any = SquareBucket(bucket)
    return powerSGD_hook(state, square).then(cut)


_POWER_STATE = ("error_dict", "p_memory_dict", "q_memory_dict", "iter", "next_stats_report",
                "total_numel_before_compression", "total_numel_after_compression")  # fmt: skip


def power_tree(state: Any) -> dict[str, Any]:
    """What PowerSGD has learnt of the gradients so far, for a checkpoint. Local."""
    return {name: getattr(state, name) for name in _POWER_STATE} | {"rng": state.rng.get_state()}


def restore_power(state: Any, tree: Mapping[str, Any], device: torch.device) -> None:
    """Take back what `power_tree` gave. Local."""
    for name in _POWER_STATE:
        value = tree[name]
        if isinstance(value, dict):
            value = {index: tensor.to(device) for index, tensor in value.items()}
        setattr(state, name, value)
    state.rng.set_state(tree["rng"])


def _hook_of(kind: DDPCommunicationHookType) -> Hook:
    if kind in _FORMATS:
        return compressing(_FORMATS[kind])
    if kind is DDPCommunicationHookType.BATCHED_POWER_SGD:
        return batched_power_sgd
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    return powerSGD_hook


def _power_state(model: nn.parallel.DistributedDataParallel, options: Mapping[str, Any]) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    if model.device_type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "comm_hook: torch's PowerSGD waits for a CUDA device where there is one, which fails for a model on the "
            "CPU. Hide the devices (CUDA_VISIBLE_DEVICES=''), or use comm_hook='bf16'."
        )
    try:
        return PowerSGDState(model.process_group, **options)
    except (TypeError, ValueError) as error:
        known = [name for name in PowerSGDState.__init__.__code__.co_varnames if name not in ("self", "process_group")]
        unknown = [name for name in options if name not in known]
        hint = suggest(unknown[0], PowerSGDState.__slots__) if unknown else str(error).strip()
        raise ConfigError(f"comm_state_option={dict(options)!r} can't be used. {hint}") from error


def _read(option: str, value: Any, accepted: list[DDPCommunicationHookType]) -> DDPCommunicationHookType:
    words = [kind.value for kind in accepted]
    if value not in words:  # a member of the enumeration is equal to its word
        raise ConfigError(f"{option}={str(value)!r} is unknown. {suggest(value, words)}")
    return DDPCommunicationHookType(value)
