"""`Strategy`: how one training step is carried out across devices."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.finite import find_nonfinite_weight, tensor_norms
from ..checkpoint.names import unwrapped
from ..checkpoint.stored import read_all
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..data.prepare import prepare_loader
from ..distributed.errors import ConfigError
from ..distributed.kinds import DistributedType
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from .gradient_state import GradientState
from .outcome import StepOutcome
from .pipeline_layers import Loss, Pipelined, whole_loss
from .precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.process import ProcessState
    from .memory import StrategyMemory, Surroundings


class Strategy(ABC):
    """How a model is placed, and how backward and the optimizer step run.

    A concrete strategy is final; what varies is composed. It is made from its own options alone and receives its
    surroundings once, by `attach`, from the `Accelerator` that owns it. Neither loop asks which strategy it has.
    """

    takes_several: ClassVar[bool] = True
    """Whether it is one for several processes: a Trainer that no launcher started then takes all devices."""
    converts_layers: ClassVar[bool] = False
    """Whether it lets layers compute in FP8."""
    kind: ClassVar[DistributedType | None] = None
    """Accelerate's word for how its processes work together; None: that for their devices."""
    plugin: Any = None
    """What an `Accelerator` was given in place of its options, by Accelerate's names; None: nothing."""
    plugins: Mapping[str, Any] = MappingProxyType({})
    """Several of them by name, where it may choose."""

    process: ProcessState
    """The process and its device."""
    precision: Precision
    """The number formats of a step."""
    gradient_state: GradientState
    """Where the current micro-batch stands in its window."""

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        """Receive the surroundings; called once, before anything else. Local.

        Raises:
            ConfigError: it belongs to another run already.
        """
        if hasattr(self, "process"):
            raise ConfigError(
                f"{type(self).__name__} already belongs to another Trainer or Accelerator. Make a new one for each."
            )
        self.process, self.precision, self.gradient_state = process, precision, gradient_state

    def choose_device(self, process: ProcessState) -> torch.device:
        """Where this process will compute; called once, before `attach`. Local."""
        return process.device

    def select_plugin(self, plugin: Any) -> None:
        """Use another of `plugins`, before a model is set up. Local.

        Raises:
            ConfigError: there is nothing to choose from, or it is too late.
        """
        raise ConfigError(f"{type(self).__name__} has no plugins to choose from.")

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.process.device

    @property
    def data_share(self) -> DataShare:
        """Which share of the data this process gets."""
        return DataShare(num_processes=self.process.num_processes, process_index=self.process.process_index)

    @property
    def mesh_sizes(self) -> MeshSizes:
        """How many processes there are along each axis of their mesh. Local."""
        return MeshSizes(replicate=self.process.num_processes, shard=1)

    def use_mesh(self, sizes: MeshSizes) -> None:
        """Lay the processes out in a mesh; called once attached, before anything is set up. Local.

        Raises:
            ConfigError: this strategy has copies alone, or was told of another mesh.
        """
        if sizes == MeshSizes(replicate=sizes.replicate, shard=1):
            return
        raise ConfigError(
            f"{type(self).__name__} has no mesh of copies, parts and layers, and one was given. Use strategy='fsdp'."
        )

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of all processes, None where there is none. Collective when it is asked for first."""
        return None

    def context_parallel(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[Any] | None:
        """A context of one step in which processes have parts of each sequence; None where they have all of it.
        Collective.

        Args:
            buffers: inputs, targets, positions: cut in place, and put back afterwards.
            dims: of each of them that of the sequence.
            kept: those that stay cut.
        """
        return None

    def place(self, model: nn.Module) -> None:
        """Move a model that is only evaluated to the device. Local."""
        model.to(self.device)

    def building(self) -> AbstractContextManager[Any]:
        """A context in which a model is built that is set up later. Collective where processes keep parts of it."""
        return contextlib.nullcontext()

    def whole_shapes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which the parameters of the unwrapped model have their whole shapes, and not always values; an
        optimizer may be made in it. Local.
        """
        return contextlib.nullcontext()

    @property
    def shows_weights(self) -> bool:
        """Whether parameters have their values (this process's part, where they are sharded) between two passes."""
        return True

    def weight_part(self, model: nn.Module, parameter: Tensor) -> Tensor:
        """What this process has of a parameter's values between two steps, to read and to write: the parameter, unless
        what is updated is kept elsewhere. Local.
        """
        return parameter

    def show_parts(self, model: nn.Module) -> Callable[[], None]:
        """Let the model compute with what was written into the `weight_part` of parameters. Collective where these are
        kept elsewhere.

        Returns:
            What lets it compute with the former values again, once they are written back. Local.
        """
        return _do_nothing

    @abstractmethod
    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place and wrap a model with its optimizers. Collective.

        Args:
            model: any module.
            optimizers: those of its parameters; none for a model that is only evaluated.
            method: the model's method that training calls, by `training_method`. None: it calls parts of the model as
                it likes, and only `backward` and `step` of this strategy.
        Returns:
            The model as it is called from now on, and the optimizers in the same order.
        Raises:
            ConfigError: the combination can't work.
        """

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """A method of the model as training calls it, so that the strategy sees the forward pass. Local.

        Args:
            model: what `setup` returned.
            name: the method that `setup` was told of.
        """
        method: Callable[..., Any] = getattr(self.unwrap(model), name)
        return method

    def evaluation_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """A method of the model as an evaluation calls it. Local.

        Args:
            model: what `setup` returned.
            name: the method.
        """
        method: Callable[..., Any] = getattr(self.unwrap(model), name)
        return method

    def pipelined_loss(self, model: Pipelined, batch: Any) -> Loss:
        """The loss of a batch that goes through the layers of a model one after another. Collective where
        processes have different layers.

        Args:
            model: as it was given to `setup`.
            batch: the same on all processes that have layers of one copy.
        """
        return whole_loss(model, batch)

    def finish_evaluation(self) -> None:
        """End this process's calls of an evaluation, where it needs other processes and they it. Collective."""
        while self.sit_out_evaluation():
            pass

    def sit_out_evaluation(self) -> bool:
        """Take part in the forward pass of a batch that others have in an evaluation, and this process has not.
        Collective where each pass is.

        Returns:
            Whether any had one. Where passes need nobody else, never.
        """
        return False

    def setup_dataloader(
        self,
        loader: Iterable[Any],
        configuration: DataLoaderConfiguration | None = None,
        *,
        exact: bool = False,
        places: bool = True,
        ordinal: int = 0,
    ) -> PreparedLoader:
        """The loader for this process: its share of the samples, each batch moved to the device. Collective.

        Args:
            loader: any iterable of batches.
            configuration: how it is shared.
            exact: deal whole batches, none twice and none left out, so that an evaluation counts each sample once;
                processes may get different numbers of batches then.
            places: whether batches are moved to the device.
            ordinal: tells this loader from others of the run, whose workers are to draw other numbers.
        """
        share = self.data_share
        return prepare_loader(
            loader,
            process=share,
            num_peers=share.num_peers,
            configuration=configuration or DataLoaderConfiguration(),
            device=self.device if places else None,
            active=self.gradient_state.loaders,
            exact=exact,
            ordinal=ordinal,
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide a micro-batch's loss by the size of its window, scale it where the precision asks, and run backward.
        Collective where gradients are reduced.

        Args:
            loss: a scalar.
            kwargs: as `Tensor.backward` takes them.
        """
        window_size = self.gradient_state.window_size
        if window_size != 1:
            loss = loss / window_size
        if self.precision.scales:
            loss = self.precision.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step a torch optimizer if gradients synchronise now, else do nothing. Unscales what is not yet unscaled.
        Local, unless a strategy says otherwise.
        """
        if not self.gradient_state.sync_gradients:
            return StepOutcome.ACCUMULATED
        return StepOutcome.APPLIED if self.precision.step(optimizer) else StepOutcome.SKIPPED

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward does not reduce gradients over processes. Local."""
        return contextlib.nullcontext()

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context whose next backward reduces gradients, although its forward passes were under `no_sync`.
        Local.
        """
        return contextlib.nullcontext()

    def take_part(self, model: nn.Module) -> None:
        """Take part in the reduction of gradients with zeros, in a process that has no loss to reduce. Collective."""

    def sit_out(self, model: nn.Module) -> None:
        """Take part in the passes of a micro-batch that reduces nothing, in a process that has no loss in it.
        Collective where each pass is.
        """

    def check_splitting(self) -> None:
        """Refuse to let a process train a micro-batch in parts by itself, and do it again where memory runs out. Local.

        Raises:
            ConfigError: other processes have a part in its passes, or another library counts them.
        """
        raise ConfigError(
            f"auto_accumulate=True can't be used with {type(self).__name__}, whose passes can't be left in their "
            "middle: other processes would wait there, or a library counts them. Use strategy='single', 'ddp' or "
            "'fsdp', or smaller batches with accumulate=, which find_executable_batch_size can look for."
        )

    @property
    def splits_together(self) -> bool:
        """Whether all processes have a part in each pass, so that a micro-batch goes in as many parts on all of them.
        For strategies that `check_splitting` accepts.
        """
        return False

    def guarded(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context of passes that all processes leave together where memory runs out on one of them. Collective where
        each pass is.

        Raises:
            LeftPass: it ran out on another process.
        """
        return contextlib.nullcontext()

    def unreduced_gradients(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Gradients of an open window that are not reduced yet, and that parameters don't hold. Local."""
        return {}

    def restore_unreduced(self, model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        """Put back what `unreduced_gradients` gave, on any device. They are not copied. Local."""

    def share_buffers(self, model: nn.Module) -> None:
        """Do now what the next forward pass would begin with, if that is the first of its window: share the buffers of
        process 0. For strategies that `check_splitting` accepts. Collective where that pass would be.
        """

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clear the gradients of a window that will not be closed, also those that were not reduced yet. Local."""
        self.precision.forget(optimizer)
        optimizer.zero_grad()

    def synchronize_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of process 0, such as the means of batch norm. Collective."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """A context in which processes that have more batches than others go on alone. Collective."""
        return contextlib.nullcontext()

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply gradients in place, as the exact weighting of a window needs it. Local."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        dense = [g for g in gradients if not g.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale unscaled gradients so that their global norm is at most `max_norm`. Returns the norm before, a
        scalar. Collective where each process has a part of a gradient.
        """
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        """Cut unscaled gradients to the range from `-value` to `value`. Local."""
        torch.nn.utils.clip_grad_value_(list(parameters), value)

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        """The norm of each parameter's gradient, a scalar; None for one that has none. Collective where each process
        has a part of a gradient.
        """
        chosen = list(parameters)
        found = {index: p.grad for index, p in enumerate(chosen) if p.grad is not None and p.grad.numel() > 0}
        norms = dict(zip(found, self._norms_of(list(found.values()), norm_type), strict=True))
        return [norms.get(index) for index in range(len(chosen))]

    def _norms_of(self, gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        return tensor_norms(gradients, norm_type)

    @property
    def can_save_alone(self) -> bool:
        """Whether one process has the whole model and its whole state, so that it can compute by itself, and save it
        when others have failed.
        """
        return True

    @property
    def can_go_back(self) -> bool:
        """Whether a training can go back to a snapshot in memory: the weights that the model shows are those that the
        optimizer steps on.
        """
        return True

    def nonfinite_weight(self, model: nn.Module) -> str | None:
        """The name of the first weight, of what this process has of them, that can't be right. Local."""
        return find_nonfinite_weight(self.unwrap(model))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of the unwrapped model, for a checkpoint: of sharded tensors (DTensors) each process has its part,
        the others, and all where none is sharded, are whole on the main process at least. Collective.
        """
        return self.unwrap(model).state_dict()

    def whole_model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the unwrapped model, on the main process at least. Collective."""
        return self.model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take back what `whole_model_state` gave on the main process, where every process has it. Collective."""
        self.unwrap(model).load_state_dict(state, strict=strict)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which every process writes the same weights into the unwrapped model. Collective where each
        process trains a part of them.
        """
        return contextlib.nullcontext()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, for a checkpoint: tensors as in `model_state`. Collective."""
        return optimizer.state_dict()

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take back what `optimizer_state` gave, whole and on every process. Collective.

        Args:
            model: whose parameters it has.
            optimizer: as it was set up.
            state: it may be changed. Tensors may be on disk, as `StoredTensor`s: of these is read what is needed.
        """
        optimizer.load_state_dict(read_all(dict(state)))

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """What a checkpoint keeps of this process alone: what makes its next step differ from that of others. Local."""
        return {}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Take back what `process_state` gave, after the model's and the optimizers' states. Collective."""

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        """What it would hold in memory there, for a plan of a run; None: it can't tell. Local."""
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model without what data parallelism and the compiler put around it. Nothing is changed. Local."""
        return unwrapped(model)

    def restore_layers(self, model: nn.Module) -> None:
        """Give a model the layers back that were converted in it, in place, with the weights of now. Local."""

    def teardown(self) -> None:
        """Free what `setup` took. Local."""

    def forget_models(self) -> None:
        """Forget the models that were set up, which are not trained again. Local."""


def _do_nothing() -> None:
    pass
