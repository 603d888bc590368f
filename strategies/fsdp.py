"""A part of each weight in each process: gathered where it is needed, and freed after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..data.loader import PreparedLoader
from ..distributed import watch
from ..distributed.errors import ConfigError, DataError
from ..distributed.exchange import exchange
from ..distributed.kinds import DistributedType
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from . import sharded_state
from .averaging import average_gradients, broadcast_tensors
from .buffers import load_buffers, saved_buffers
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .layout import Layout
from .memory import StrategyMemory, Surroundings
from .memory_sharded import memory_of
from .optimizer import move_optimizer_state
from .optimizer_limits import check_steps_parts, step_apart
from .outcome import StepOutcome
from .sharded_building import make_sharded, recompute_units
from .sharded_gradients import clip_norm, local_gradients
from .sharded_guard import check_guardable, guarded
from .sharded_model import Called, Sharded, free, syncing
from .sharded_norms import whole_norms
from .sharded_options import ShardedOptions, read_mesh
from .strategy import Strategy
from .suitability import check_replicable, check_trained, is_trainable
from .tensor_agreement import Agreement
from .tensor_leaving import Leaving
from .wrapping import AUTO, WrapPolicy, find_units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
class FSDPStrategy(Strategy):
    """Spreads weights, gradients and optimizer states over the processes with torch's `fully_shard`: `strategy="fsdp"`.

    All processes begin with the weights of process 0; the model may be on the meta device elsewhere. In one process it
    only places the model.

    Args:
        wrap: which modules are units, whose weights are gathered and freed together: as `find_units` takes it.
        reshard_after_forward: free a unit's weights after its forward, and gather them again for its backward. The
            outermost unit keeps its own until then.
        cpu_offload: keep parts, gradients and optimizer states on the host.
        mesh: how processes share the work: a mapping with some of `replicate` (copies, over which gradients are
            averaged), `shard` (parts of the weights; left out: what the others leave), `tensor` (parts of the layers),
            and `sequence` or `context` (parts of the sequences). `(copies, parts)` stands for the first two.
        tensor_plan: how layers are cut over `tensor`: patterns of modules' names with words or torch's styles, see
            `find_plan`. None: the model's own `tp_plan`.
        activation_checkpointing: units keep no activations but their inputs, and compute them again in backward.
        activation_offload: keep these inputs on the host until backward.
        param_dtype: in which format units compute: `"fp32"`, `"bf16"`, `"fp16"`. None: that of the run's precision.
            Trained weights themselves are in fp32 then.
        reduce_dtype: in which format gradients are reduced. None: fp32.
        output_dtype: of what the model gives. None: as it comes.
        prefetch: units whose weights are gathered ahead in forward, in the order in which the model holds them.
        ignored_modules: modules that stay whole in each process: themselves, or regular expressions that match their
            whole names.
        whole_states: checkpoints hold whole weights and optimizer states, put together on the host of process 0, in
            place of the parts that each process writes.
        find_unused_parameters: reduce zeros for parameters that have no part in a loss, where processes use different
            ones.
    Raises:
        ConfigError: an option can't be used.
    """

    kind = DistributedType.FSDP

    def __init__(
        self,
        *,
        wrap: WrapPolicy = AUTO,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        mesh: Sequence[int] | Mapping[str, int] | MeshSizes | None = None,
        tensor_plan: Mapping[str, Any] | None = None,
        activation_checkpointing: bool = False,
        activation_offload: bool = False,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        prefetch: int = 0,
        ignored_modules: Sequence[str | nn.Module] = (),
        whole_states: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        self.options = ShardedOptions(
            wrap=wrap,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            tensor_plan=tensor_plan,
            activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            output_dtype=output_dtype,
            prefetch=prefetch,
            ignored_modules=ignored_modules,
            whole_states=whole_states,
            find_unused_parameters=find_unused_parameters,
        )
        self.mesh = read_mesh(mesh)
        self._models: list[Sharded] = []
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Optimizers that were compared with the models, and how many parameters they had."""
        self._layout: Layout | None = None
        self._agreement: Agreement | None = None
        self._leaving: Leaving | None = None
        self.before_sharding: Callable[[Sequence[tuple[nn.Module, str]]], None] | None = None
        """Called with the modules and names of each unit's parameters before they are spread; `FP8Strategy` sets it."""
        self._evaluated: tuple[Sharded, str] | None = None
        """The model that is evaluated now, and by which method."""

    @classmethod
    def from_plugin(
        cls, plugin: FullyShardedDataParallelPlugin, num_processes: int, num_nodes: int, **options: Any
    ) -> FSDPStrategy:
        """The strategy with an `Accelerator`'s plugin, and further options, for so many processes on so many machines.

        Raises:
            ConfigError: an option can't be used.
        """
        strategy = cls(**(plugin.options(num_processes, num_nodes) | options))
        strategy.plugin = plugin
        return strategy

    @property
    def data_share(self) -> DataShare:
        """As of every strategy: processes along the axes of layers and sequences get the same batches."""
        if self.mesh is None:
            return super().data_share
        return self.mesh.share(self.process.process_index, self.process.num_processes)

    @property
    def mesh_sizes(self) -> MeshSizes:
        return (self.mesh or MeshSizes()).filled(self.process.num_processes)

    def use_mesh(self, sizes: MeshSizes) -> None:
        if self.mesh is not None and self.mesh != sizes:
            raise ConfigError(
                f"FSDPStrategy(mesh={self.mesh}), and the run is given {sizes}. Give the mesh in one place."
            )
        self.mesh = sizes

    @property
    def device_mesh(self) -> DeviceMesh | None:
        return self._find_layout().mesh if self.process.num_processes > 1 else None

    def context_parallel(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[Any] | None:
        sequences = self._find_layout().sequences if self.process.num_processes > 1 else None
        return None if sequences is None else sequences.cut(buffers, dims, kept)

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        known = self._find(model)
        if known is not None:
            return self._set_up_again(known, optimizers, method)
        check_replicable(model)
        check_trained(model, optimizers, method)
        if self.plugin is not None:
            self.options = replace(self.options, wrap=self.plugin.wrap)  # which may have been set since
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            sharded_state.check_parameters(optimizer, model, names)
        if self.process.num_processes == 1:
            return self._place(model, optimizers)
        check_steps_parts(optimizers, "fsdp")
        if method == "forward" and not optimizers and is_trainable(model):
            raise ConfigError(
                f"{type(model).__name__} was set up without its optimizer, and strategy='fsdp' replaces the parameters "
                "that an optimizer holds. Pass both in one call: accelerator.prepare(model, optimizer); for a model "
                "that is only evaluated, prepare_model(model, evaluation_mode=True)."
            )
        _check_automatic(model, optimizers, method)
        with watch.collective(f"setup of {type(model).__name__}"):
            found = make_sharded(
                model, method, self.options, self._find_layout(), self.process, self.precision, self.before_sharding
            )
        for optimizer in optimizers:
            sharded_state.rebuild(optimizer, model, names)
            step_apart(optimizer)
        self._models.append(found)
        return found.entry, list(optimizers)

    def setup_dataloader(self, loader: Iterable[Any], *args: Any, **options: Any) -> PreparedLoader:
        """The loader for this process, as every strategy gives it. Collective.

        Raises:
            DataError: processes would have different numbers of batches in an accumulation window.
        """
        prepared = super().setup_dataloader(loader, *args, **options)
        accumulates = self.gradient_state.num_steps > 1
        if accumulates and not options.get("exact") and self.process.num_processes > 1 and not prepared.is_even:
            raise DataError(
                "processes may get different numbers of batches of this loader, and with strategy='fsdp' each batch of "
                "an accumulation window needs all of them. Use DataLoaderConfiguration(even_batches=True), a dataset "
                "with a length, or accumulate=1."
            )
        return prepared

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        found = self._find(model)
        if found is None or found.passes is None:
            return super().training_method(model, name)
        return Called(found.passes, name)

    def evaluation_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        found = self._find(model)
        if found is None or found.passes is None:
            return super().evaluation_method(model, name)
        self._evaluated = found, name
        return Called(found.passes, name, found.entry)

    def sit_out_evaluation(self) -> bool:
        """Make the forward pass of processes that have one more batch, if any has. Collective."""
        if self._evaluated is None or not any(exchange(False, "evaluation")):
            self._evaluated = None
            return False
        found, name = self._evaluated
        assert found.passes is not None
        with watch.collective(f"{name} of other processes"):
            found.passes.forget(name)
            found.passes.make_empty(name)
            free(found.entry)
        return True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as every strategy does, which gathers weights and reduces gradients. Collective."""
        sequences = None if self._layout is None else self._layout.sequences
        with watch.collective("backward"), nullcontext() if sequences is None else sequences.backward():
            for found in self._models:
                if found.passes is not None:
                    found.passes.before_backward(loss)
            super().backward(loss, **kwargs)
        if self._leaving is not None:
            self._leaving.passed()
        for found in self._models:
            if found.passes is not None:
                found.passes.went_back()
            self._reduce_whole(found)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step as every strategy does. Local; with a tensor axis collective in an optimizer's first steps.

        Raises:
            ConfigError: the optimizer holds parameters that were replaced when their model was sharded, or gradients
                differ along the tensor axis that have to be alike.
        """
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._models and self._checked.get(optimizer) != num_parameters and self.gradient_state.sync_gradients:
            known = {id(p): None for found in self._models for p in found.model.parameters()}
            sharded_state.check_parameters(optimizer, self._models[-1].model, known)
            self._checked[optimizer] = num_parameters
        if self._models and self._agreement is not None and self.gradient_state.sync_gradients:
            self._agreement.check(optimizer, [found.model for found in self._models])
        if any(found.whole for found in self._models):
            step_apart(optimizer)  # each time: a checkpoint may have brought other settings
        return super().step(optimizer)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        found = self._find(model)
        return nullcontext() if found is None else syncing(found, False)

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        found = self._find(model)
        return nullcontext() if found is None else syncing(found, True)

    def take_part(self, model: nn.Module) -> None:
        found = self._find(model)
        if found is not None and found.passes is not None:
            if self._leaving is not None:
                self._leaving.leave()
            with watch.collective("passes without a loss of its own"):
                found.passes.make_empty(found.entry.method)
            self._reduce_whole(found)

    def sit_out(self, model: nn.Module) -> None:
        self.take_part(model)

    def check_splitting(self) -> None:
        """Accept it on one process, and where each process has whole batches and a part of each weight. Local.

        Raises:
            ConfigError: the mesh has other axes, or torch can't take a pass back.
        """
        if self.process.num_processes > 1:
            check_guardable(self.mesh_sizes)

    @property
    def splits_together(self) -> bool:
        return self.process.num_processes > 1

    def guarded(self, model: nn.Module) -> AbstractContextManager[None]:
        found = self._find(model)
        return nullcontext() if found is None else guarded(found)

    def unreduced_gradients(self, model: nn.Module) -> Mapping[str, Tensor]:
        found = self._find(model)
        return {} if found is None else sharded_state.accumulated_gradients(found.entry)

    def restore_unreduced(self, model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        found = self._find(model)
        if found is not None:
            sharded_state.restore_accumulated(found.entry, gradients)

    def synchronize_buffers(self, model: nn.Module) -> None:
        found = self._find(model)
        if found is not None:
            broadcast_tensors(found.model.buffers(), "broadcast of buffers")

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().forget_gradients(model, optimizer)
        found = self._find(model)
        if found is not None:
            sharded_state.restore_accumulated(found.entry, {})  # none

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        gradients = local_gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale unscaled gradients so that their global norm is at most `max_norm`. Collective.

        Returns:
            The norm before, a scalar.
        """
        return clip_norm(parameters, max_norm, norm_type, self.device)

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        for gradient in local_gradients(parameters):
            gradient.clamp_(-value, value)

    def _norms_of(self, gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        return whole_norms(gradients, norm_type, self.device)

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        return memory_of(self.options, self.mesh, surroundings)

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of the unwrapped model, of which each process has its part. Local; with `whole_states` as
        `whole_model_state`.
        """
        if self._saves_whole:
            return self.whole_model_state(model)
        self._reshard(model)
        return sharded_state.model_state(self.unwrap(model))

    def whole_model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the unwrapped model on the host of the main process, nothing elsewhere. Collective."""
        self._reshard(model)
        return sharded_state.whole_model_state(self.unwrap(model), self.process.is_main_process)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Put a full state, which every process has, into the parts of each. Local."""
        self._reshard(model)
        sharded_state.load_model_state(self.unwrap(model), state, strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, of which each process has its part. Local; with `whole_states` the full state on
        the host of the main process, elsewhere its groups alone, and collective.
        """
        state = super().optimizer_state(model, optimizer)
        if not self._saves_whole:
            return state
        return sharded_state.whole_optimizer_state(state, self.process.is_main_process)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Put a full state, which every process has or can read, into the parts of each. Local."""
        sharded_state.load_optimizer_state(optimizer, state)

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Its own buffers beside the main process, and gradients of an open window that were not reduced yet. Local."""
        found = self._find(model)
        if found is None:
            return {}
        buffers = {} if self.process.is_main_process else saved_buffers(found.model)
        return {"buffers": buffers, "accumulated": sharded_state.accumulated_gradients(found.entry)}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        found = self._find(model)
        if found is not None:
            load_buffers(found.model, state.get("buffers", {}))
            sharded_state.restore_accumulated(found.entry, state.get("accumulated", {}))

    def forget_models(self) -> None:
        self._models.clear()
        self._evaluated = None

    @property
    def _saves_whole(self) -> bool:
        if self.plugin is not None:
            return bool(self.plugin.saves_whole)  # which may be set at any time
        return self.options.whole_states

    def _find(self, model: nn.Module) -> Sharded | None:
        inner = unwrapped(model)
        return next((found for found in self._models if found.model is inner), None)

    def _reshard(self, model: nn.Module) -> None:
        """Free what a forward pass without backward has left whole. Local."""
        found = self._find(model)
        if found is not None:
            free(found.entry)

    def _place(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        self.mesh_sizes.filled(1)  # refuses a mesh of several
        model.to(self.device)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        recompute_units(find_units(model, self.options.wrap), self.options)
        return model, list(optimizers)

    def _set_up_again(
        self, known: Sharded, optimizers: Sequence[Optimizer], method: str | None
    ) -> tuple[nn.Module, list[Optimizer]]:
        _check_automatic(known.model, optimizers, method)
        free(known.entry)
        own = {id(parameter): None for parameter in known.model.parameters()}
        for optimizer in optimizers:
            sharded_state.check_parameters(optimizer, known.model, own)
        if method not in (None, known.entry.method if known.passes else "forward"):
            if known.passes is None:
                raise ConfigError(f"{type(known.model).__name__} was sharded for its forward alone. Make it anew.")
            known.entry.method = method
        return known.entry, list(optimizers)

    def _find_layout(self) -> Layout:
        """The mesh of the processes that there are. Collective where they have none yet."""
        if self._layout is None or self._layout.group is not dist.group.WORLD:
            self._layout = Layout(self.mesh, self.device)
            axis = self._layout.tensor
            self._agreement = None if axis is None else Agreement(axis, self.device)
            self._leaving = Leaving(self.data_share) if self.data_share.num_peers > 1 else None
        return self._layout

    def _reduce_whole(self, found: Sharded) -> None:
        """Average the gradients of what is not spread, which no unit reduces. Collective where it is trained."""
        if found.syncs and found.whole:
            if found.guard is not None:
                found.guard.meet()
            average_gradients(found.whole, "averaging of gradients")


def _check_automatic(model: nn.Module, optimizers: Sequence[Optimizer], method: str | None) -> None:
    if method is None and optimizers:
        raise ConfigError(
            f"{type(model).__name__} is trained by manual optimization, which strategy='fsdp' can't serve: a loss goes "
            "backward there before the forward pass of the whole task has ended. Use automatic optimization, or 'ddp'."
        )
