"""One process that computes on all XLA devices: batches are cut over them, and with FSDP weights are as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..distributed import xla
from ..distributed.nested import named_tensors
from .wrapping import WrapPolicy, find_units

_AXIS = "fsdp"
"""The axis of the mesh, as torch_xla's FSDP wants it named."""


class XLAMesh:
    """All XLA devices that there are, in a row; SPMD is on. Local."""

    def __init__(self) -> None:
        self.num_devices: int = xla.load("runtime").global_runtime_device_count()
        """Devices over which batches are cut."""
        self._mesh: Any = None

    def sharding_of(self, tensor: Tensor) -> Any:
        """How a tensor of a batch is cut: along its first dimension; None where that can't be cut evenly. Local."""
        if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % self.num_devices:
            return None
        return _spmd().ShardingSpec(self.mesh, (_AXIS, *[None] * (tensor.dim() - 1)))

    @property
    def mesh(self) -> Any:
        """torch_xla's object."""
        if self._mesh is None:
            self._mesh = _spmd().get_1d_mesh(_AXIS)
        return self._mesh

    def shard(self, model: nn.Module, wrap: WrapPolicy) -> None:
        """Spread the weights of a model on the device over all devices, by torch_xla's FSDP of version 2. Local.

        The modules stay what they are, with their names: units keep the barriers and the cut outputs of torch_xla's
        wrapper, which is not put around them.

        Args:
            model: on the device.
            wrap: which modules are units.
        """
        wrapper = xla.load("experimental.spmd_fully_sharded_data_parallel").SpmdFullyShardedDataParallel
        for unit in find_units(model, wrap):
            if not getattr(unit, _MARK, False):
                wrapper(unit, mesh=self.mesh, shard_output=_unused)
                unit.register_forward_hook(self._cut_outputs)
                unit.__dict__[_MARK] = True
        self.mark(model.parameters())

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Cut those parameters that are whole along their longest dimension. Local."""
        for parameter in parameters:
            if parameter.dim() and not is_cut(parameter):
                longest = max(range(parameter.dim()), key=lambda dim: parameter.shape[dim])
                spec = tuple(_AXIS if dim == longest else None for dim in range(parameter.dim()))
                _spmd().mark_sharding(parameter, self.mesh, spec)

    def _cut_outputs(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        for _, tensor in named_tensors(outputs):
            if self.sharding_of(tensor) is not None:
                _spmd().mark_sharding(tensor, self.mesh, (_AXIS, *[None] * (tensor.dim() - 1)))


def is_cut(parameter: Tensor) -> bool:
    """Whether a tensor on the device is cut over several. Local."""
    return xla.load()._XLAC._get_xla_sharding_spec(parameter) not in ("", "{replicated}")


def _spmd() -> Any:
    return xla.load("distributed.spmd")


_MARK = "_loopwright_xla_unit"
_unused: Callable[[Any, Any], None] = lambda outputs, mesh: None  # noqa: E731 - the wrapper's forward is never called
