"""Options of sharding as users write them, checked, and what they are for torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..distributed.errors import ConfigError, check_boolean, check_integer, suggest
from ..distributed.meshes import MeshSizes
from .tensor_parallel import read_plan
from .wrapping import WrapPolicy, check_policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .precision import Precision

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLAGS = (
    "reshard_after_forward", "cpu_offload", "activation_checkpointing", "activation_offload", "find_unused_parameters",
    "whole_states",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOptions:
    """How a model is sharded. `FSDPStrategy` has arguments of the same names, and says what they mean.

    Raises:
        ConfigError: an option can't be used.
    """

    wrap: WrapPolicy
    reshard_after_forward: bool
    cpu_offload: bool
    tensor_plan: Mapping[str, Any] | None
    activation_checkpointing: bool
    activation_offload: bool
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    prefetch: int
    ignored_modules: Sequence[str | nn.Module]
    whole_states: bool
    find_unused_parameters: bool

    def __post_init__(self) -> None:
        check_policy("FSDPStrategy(wrap)", self.wrap)
        for name in _FLAGS:
            check_boolean(f"FSDPStrategy({name})", getattr(self, name))
        if self.activation_offload and not self.activation_checkpointing:
            raise ConfigError("FSDPStrategy(activation_offload=True) needs activation_checkpointing=True. Give both.")
        object.__setattr__(self, "tensor_plan", read_plan("FSDPStrategy(tensor_plan)", self.tensor_plan))
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            word = getattr(self, name)
            if word is not None and word not in _FORMATS:
                raise ConfigError(f"FSDPStrategy({name}={word!r}) is unknown. {suggest(word, _FORMATS)}")
        check_integer("FSDPStrategy(prefetch)", self.prefetch, 0, "It counts units.")
        if isinstance(self.ignored_modules, (str, nn.Module)):
            raise ConfigError(f"FSDPStrategy(ignored_modules={self.ignored_modules!r:.80}). Expected a list.")
        object.__setattr__(self, "ignored_modules", tuple(self.ignored_modules))

    def compute_format(self, of_run: torch.dtype | None) -> torch.dtype | None:
        """In which format units compute, None: as the weights are. Local.

        Args:
            of_run: that of the run's precision.
        """
        return of_run if self.param_dtype is None else _FORMATS[self.param_dtype]

    def reduce_format(self, of_run: torch.dtype | None) -> torch.dtype | None:
        """In which format gradients are reduced, None: as they come. Local.

        Args:
            of_run: as `compute_format` takes it.
        """
        if self.reduce_dtype is not None:
            return _FORMATS[self.reduce_dtype]
        return None if self.compute_format(of_run) is None else torch.float32

    @property
    def output_format(self) -> torch.dtype | None:
        """The format of what the model gives, None: as it comes."""
        return None if self.output_dtype is None else _FORMATS[self.output_dtype]


def unit_arguments(
    options: ShardedOptions, mesh: DeviceMesh, precision: Precision, device: torch.device, ignored: set[nn.Parameter]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `fully_shard` is given: for the units inside of a model, and for the outermost. Local.

    Args:
        options: of the sharding.
        mesh: the axes over which weights are spread.
        precision: of the run.
        device: where this process computes.
        ignored: parameters that stay whole.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    computes = options.compute_format(precision.compute_format)
    reduces = options.reduce_format(precision.compute_format)
    inner: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=reduces),
    }
    if ignored:
        inner["ignored_params"] = ignored
    if options.cpu_offload:
        inner["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    # Under autocast the outermost unit's inputs, targets among them, stay as they are.
    policy = MixedPrecisionPolicy(computes, reduces, options.output_format, not precision.autocasts)
    keeps = None if options.reshard_after_forward else False
    return inner, inner | {"mp_policy": policy, "reshard_after_forward": keeps}


def read_mesh(mesh: Sequence[int] | Mapping[str, int] | MeshSizes | None) -> MeshSizes | None:
    """The sizes of a mesh: given by name, or as two numbers, copies and parts. Local.

    Raises:
        ConfigError: it is something else, or a size is no integer of at least 1.
    """
    if mesh is None or isinstance(mesh, MeshSizes):
        return mesh
    names = [each.name for each in fields(MeshSizes)]
    if isinstance(mesh, Mapping):
        if unknown := [name for name in mesh if name not in names]:
            raise ConfigError(
                f"FSDPStrategy(mesh={dict(mesh)!r}): {unknown[0]!r} is unknown. {suggest(unknown[0], names)}"
            )
        return MeshSizes(**mesh)
    are_sizes = isinstance(mesh, (list, tuple)) and all(type(size) is int and size > 0 for size in mesh)
    if not are_sizes or len(mesh) != 2:
        raise ConfigError(
            f"FSDPStrategy(mesh={mesh!r}). Expected two sizes, (copies, parts), a mapping with some of "
            f"{', '.join(names)}, or None."
        )
    return MeshSizes(replicate=mesh[0], shard=mesh[1])
