"""`MeshMethods`: what an `Accelerator` says of the mesh of its processes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from ..distributed.environment import read_flag
from ..distributed.errors import ConfigError, DataError
from ..distributed.meshes import CONTEXT, REPLICATE, SEQUENCE, SHARD, TENSOR
from ..distributed.parallelism import ParallelismConfig
from ..distributed.process import ProcessMethods, ProcessState
from ..strategies.context_parallel import choose_rotation
from ..strategies.registry import AUTO, FSDP, StrategyLike
from ..strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def read_parallelism_config(given: ParallelismConfig | None, process: ProcessState) -> ParallelismConfig | None:
    """How processes share the work, from the argument or the environment.

    Raises:
        ConfigError: it is something else, or its sizes don't multiply to the number of processes.
    """
    if given is None and read_flag("USE_PARALLELISM_CONFIG"):
        given = ParallelismConfig()
    if given is None:
        return None
    if not isinstance(given, ParallelismConfig):
        raise ConfigError(f"parallelism_config={given!r:.80}. Expected ParallelismConfig(...), or None.")
    if given.total_size > 1:
        given.sizes.filled(process.num_processes)
    return given


def lay_out(strategy: Strategy, config: ParallelismConfig | None) -> ParallelismConfig | None:
    """Give a strategy the mesh that was asked for; where none was, the configuration gets the strategy's own. Local.

    Raises:
        ConfigError: the strategy has no such mesh.
    """
    if config is None or config.total_size > 1:
        if config is not None:
            strategy.use_mesh(config.sizes)
        return config
    sizes = strategy.mesh_sizes
    return dataclasses.replace(
        config,
        dp_replicate_size=sizes.replicate,
        dp_shard_size=sizes.shard,
        tp_size=sizes.tensor,
        cp_size=sizes.context,
        sp_size=sizes.sequence,
    )


def strategy_of(spec: StrategyLike, config: ParallelismConfig | None) -> StrategyLike:
    """The strategy that `"auto"` means where a mesh has more than copies."""
    has_parts = config is not None and config.total_size > (config.dp_replicate_size or 1)
    return FSDP if has_parts and spec == AUTO else spec


class MeshMethods(ProcessMethods):
    """The mesh of the processes, and where this one is in it."""

    strategy: Strategy
    """How a step is carried out."""
    parallelism_config: ParallelismConfig | None
    """How processes share the work; None where that was left to the strategy."""
    _own_mesh: DeviceMesh | None = None
    _warned_of_context = False

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of all processes, None where there is none. Collective when it is asked for first."""
        mesh = self.strategy.device_mesh
        if mesh is None and self._own_mesh is None and self.parallelism_config is not None:
            self._own_mesh = self.parallelism_config.build_device_mesh(self.device.type)
        return self._own_mesh if mesh is None else mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of the layers this process has. Collective as `torch_device_mesh` is."""
        return self._rank(TENSOR)

    @property
    def context_parallel_rank(self) -> int:
        """Which part of each sequence this process has. Collective as `torch_device_mesh` is."""
        return self._rank(CONTEXT) or self._rank(SEQUENCE)  # there is one of them at most

    @property
    def data_parallel_rank(self) -> int:
        """To which copy of the model this process belongs. Collective as `torch_device_mesh` is."""
        return self._rank(REPLICATE)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which part of the weights this process has. Collective as `torch_device_mesh` is."""
        return self._rank(SHARD)

    @property
    def should_save_model(self) -> bool:
        """Accelerate's: always true. Every process has to call `save_model`, and the main process writes."""
        return True

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> Iterator[None]:
        """A context of one step in which each process has its part of the sequences, where the mesh has an axis for
        that; elsewhere it has no effect, and says so once. Collective.

        Attention in it has to be torch's `F.scaled_dot_product_attention`; with `cp_size` causal and without a mask,
        with `sp_size` a mask is one of whole sequences. Labels are shifted before.

        Args:
            buffers: inputs, targets, positions, which share no memory: cut in place, and put back afterwards.
            buffer_seq_dims: of each of them that of the sequence.
            no_restore_buffers: those that stay cut, such as what a backward behind the context needs.
        Raises:
            ConfigError: there are not as many dimensions as buffers, buffers can't be cut in place, or attention can't
                be computed so.
            DataError: sequences can't be cut into equal parts, or are not of the length that `sp_handler` has.
        """
        buffers, dims = buffers or [], buffer_seq_dims or []
        if len(buffers) != len(dims):
            raise ConfigError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} dimensions. Give one for each."
            )
        context = self.strategy.context_parallel(buffers, dims, no_restore_buffers or ())
        if context is None:
            if not self._warned_of_context:
                self._warned_of_context = True
                warnings.warn(
                    "maybe_context_parallel has no effect: sequences are cut with ParallelismConfig(sp_size=...) or "
                    "cp_size above 1.",
                    stacklevel=4,
                )
            yield
            return
        if self.parallelism_config is not None:
            _apply_handlers(self.parallelism_config, [each.shape[dim] for each, dim in zip(buffers, dims, strict=True)])
        with context:
            yield

    def _rank(self, axis: str) -> int:
        """This process's place along an axis; 0 where there is one process alone.

        Raises:
            ConfigError: several processes have no mesh.
        """
        mesh = self.torch_device_mesh
        if mesh is not None:
            return mesh.get_local_rank(axis) if axis in (mesh.mesh_dim_names or ()) else 0
        if self.parallelism_config is None and self.use_distributed:
            raise ConfigError(f"there is no mesh, and so no axis {axis}. Give parallelism_config=ParallelismConfig().")
        return 0


def _apply_handlers(config: ParallelismConfig, lengths: Sequence[int]) -> None:
    """Do what the settings of sequences in parts say, before ones of such lengths are cut."""
    if config.cp_handler is not None:
        choose_rotation(str(config.cp_handler.cp_comm_strategy))
    handler = config.sp_handler
    if handler is None or handler.sp_seq_length_is_variable:
        return
    if others := [length for length in lengths if length != handler.sp_seq_length]:
        raise DataError(
            f"maybe_context_parallel got sequences of {others[0]}, and sp_handler has sp_seq_length="
            f"{handler.sp_seq_length}. Pad them to that, or leave out sp_seq_length_is_variable=False."
        )
