"""`Layout`: the mesh of processes over which a model is spread and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.sharded import is_sharded
from ..distributed.errors import ConfigError
from ..distributed.meshes import CONTEXT, SEQUENCE, SHARD, TENSOR, MeshSizes, build_mesh, spreading_axes
from .context_parallel import RingAttention
from .sequences import Sequences
from .ulysses import ExchangedHeads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Layout:
    """The mesh of all processes of torch's group. Making one is collective.

    Args:
        sizes: of its axes; None: parts of the weights over all processes.
        device: where this process computes.
    Raises:
        ConfigError: the sizes don't multiply to the number of processes, or the device can't serve an axis.
    """

    def __init__(self, sizes: MeshSizes | None, device: torch.device) -> None:
        self.group = dist.group.WORLD
        """The processes that it was made of."""
        self.is_given = sizes is not None
        """Whether somebody has chosen its sizes."""
        self.sizes = (sizes or MeshSizes()).filled(dist.get_world_size())
        size = self.sizes.context
        if size > 1 and device.type == "cpu":
            raise ConfigError(
                f"a mesh of context {size} on the CPU: torch cuts attention over sequences on accelerators alone. Use "
                f"mesh={{'sequence': {size}}} (sp_size={size}), which exchanges heads and runs everywhere."
            )
        mesh = build_mesh(self.sizes, device.type, always=(SHARD,), joins=self.is_given)
        assert mesh is not None
        self.mesh = mesh
        self.sequences = self._find_sequences()
        """The contexts of steps on parts of sequences, None where there is no axis for them."""

    @property
    def parts(self) -> DeviceMesh:
        """The axes over which weights are spread: one, or copies times parts."""
        return spreading_axes(self.mesh)

    @property
    def tensor(self) -> DeviceMesh | None:
        """The axis over which layers are cut, None where there is none."""
        return self.mesh[TENSOR] if self.sizes.tensor > 1 else None

    def _find_sequences(self) -> Sequences | None:
        if self.sizes.context > 1:
            return RingAttention(self.mesh[CONTEXT])
        return ExchangedHeads(self.mesh[SEQUENCE]) if self.sizes.sequence > 1 else None

    def check_cut(self, model: nn.Module) -> bool:
        """Whether the user has cut layers of the model already. Local.

        Raises:
            ConfigError: they were cut over other processes than those of the tensor axis.
        """
        found = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
        for name, parameter in found.items():
            sharded: Any = parameter
            if self.tensor is None or sharded.device_mesh != self.tensor:
                raise ConfigError(
                    f"parameter {name} of {type(model).__name__} is a DTensor over {sharded.device_mesh}, which is not "
                    f"the tensor axis of this run's mesh ({self.tensor}). Cut the model over "
                    "accelerator.torch_device_mesh['tp'], or pass it uncut, with a tensor_plan."
                )
        return bool(found)
