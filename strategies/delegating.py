"""A strategy around another: all that it does not do itself, the other does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..distributed.kinds import DistributedType
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from .gradient_state import GradientState
from .outcome import StepOutcome
from .pipeline_layers import Loss, Pipelined
from .precision import Precision
from .strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.process import ProcessState
    from .memory import StrategyMemory, Surroundings


class DelegatingStrategy(Strategy):
    """Carries out steps as another strategy does. Each method is that of the other; a subclass adds to some."""

    @property
    @abstractmethod
    def inner(self) -> Strategy:
        """The other strategy."""

    # Mypy sees attributes of the class where a property has to be: the other's are known once it is.

    @property
    def takes_several(self) -> bool:  # type: ignore[override]
        return self.inner.takes_several

    @property
    def kind(self) -> DistributedType | None:  # type: ignore[override]
        return self.inner.kind

    @property
    def plugin(self) -> Any:
        return self.inner.plugin

    @property
    def plugins(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.inner.plugins

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        super().attach(process, precision, gradient_state)
        self.inner.attach(process, precision, gradient_state)

    def choose_device(self, process: ProcessState) -> torch.device:
        return self.inner.choose_device(process)

    def select_plugin(self, plugin: Any) -> None:
        self.inner.select_plugin(plugin)

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def data_share(self) -> DataShare:
        return self.inner.data_share

    @property
    def mesh_sizes(self) -> MeshSizes:
        return self.inner.mesh_sizes

    def use_mesh(self, sizes: MeshSizes) -> None:
        self.inner.use_mesh(sizes)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        return self.inner.device_mesh

    def context_parallel(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[Any] | None:
        return self.inner.context_parallel(buffers, dims, kept)

    def place(self, model: nn.Module) -> None:
        self.inner.place(model)

    def building(self) -> AbstractContextManager[Any]:
        return self.inner.building()

    def whole_shapes(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.whole_shapes(model)

    @property
    def shows_weights(self) -> bool:
        return self.inner.shows_weights

    def weight_part(self, model: nn.Module, parameter: Tensor) -> Tensor:
        return self.inner.weight_part(model, parameter)

    def show_parts(self, model: nn.Module) -> Callable[[], None]:
        return self.inner.show_parts(model)

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        return self.inner.setup(model, optimizers, method)

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        return self.inner.training_method(model, name)

    def evaluation_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        return self.inner.evaluation_method(model, name)

    def pipelined_loss(self, model: Pipelined, batch: Any) -> Loss:
        return self.inner.pipelined_loss(model, batch)

    def finish_evaluation(self) -> None:
        self.inner.finish_evaluation()

    def sit_out_evaluation(self) -> bool:
        return self.inner.sit_out_evaluation()

    def setup_dataloader(
        self,
        loader: Iterable[Any],
        configuration: DataLoaderConfiguration | None = None,
        *,
        exact: bool = False,
        places: bool = True,
        ordinal: int = 0,
    ) -> PreparedLoader:
        return self.inner.setup_dataloader(loader, configuration, exact=exact, places=places, ordinal=ordinal)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.inner.backward(loss, **kwargs)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        return self.inner.step(optimizer)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.no_sync(model)

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.trigger_sync(model)

    def take_part(self, model: nn.Module) -> None:
        self.inner.take_part(model)

    def sit_out(self, model: nn.Module) -> None:
        self.inner.sit_out(model)

    def check_splitting(self) -> None:
        self.inner.check_splitting()

    @property
    def splits_together(self) -> bool:
        return self.inner.splits_together

    def guarded(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.inner.guarded(model)

    def unreduced_gradients(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self.inner.unreduced_gradients(model)

    def restore_unreduced(self, model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        self.inner.restore_unreduced(model, gradients)

    def share_buffers(self, model: nn.Module) -> None:
        self.inner.share_buffers(model)

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.inner.forget_gradients(model, optimizer)

    def synchronize_buffers(self, model: nn.Module) -> None:
        self.inner.synchronize_buffers(model)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return self.inner.join(models)

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        self.inner.scale_gradients(parameters, factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.inner.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        self.inner.clip_grad_value(parameters, value)

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        return self.inner.gradient_norms(parameters, norm_type)

    @property
    def can_save_alone(self) -> bool:
        return self.inner.can_save_alone

    @property
    def can_go_back(self) -> bool:
        return self.inner.can_go_back

    def nonfinite_weight(self, model: nn.Module) -> str | None:
        return self.inner.nonfinite_weight(model)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return self.inner.model_state(model)

    def whole_model_state(self, model: nn.Module) -> dict[str, Any]:
        return self.inner.whole_model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        self.inner.load_model_state(model, state, strict)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.writing_weights(model)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        return self.inner.optimizer_state(model, optimizer)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self.inner.load_optimizer_state(model, optimizer, state)

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return self.inner.process_state(model, optimizers)

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        self.inner.load_process_state(model, optimizers, state)

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        return self.inner.memory(surroundings)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.inner.unwrap(model)

    def restore_layers(self, model: nn.Module) -> None:
        self.inner.restore_layers(model)

    def teardown(self) -> None:
        self.inner.teardown()

    def forget_models(self) -> None:
        self.inner.forget_models()
