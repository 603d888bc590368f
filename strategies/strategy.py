"""`Strategy`: how one training step is carried out across devices."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..data.prepare import prepare_loader
from ..distributed.errors import ConfigError
from .gradient_state import GradientState
from .outcome import StepOutcome
from .precision import Precision

if TYPE_CHECKING:
    from ..distributed.process import ProcessState


class Strategy(ABC):
    """How a model is placed, and how backward and the optimizer step run.

    A concrete strategy is final; what varies is composed. It is made from its own options alone and receives its
    surroundings once, by `attach`, from the `Accelerator` that owns it. Neither loop asks which strategy it has.
    """

    takes_several: ClassVar[bool] = True
    """Whether it is one for several processes: a Trainer that no launcher started then takes all devices."""

    process: ProcessState
    """The process and its device."""
    precision: Precision
    """The number formats of a step."""
    gradient_state: GradientState
    """Where the current micro-batch stands in its window."""

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        """Receive the surroundings; called once, before anything else.

        Raises:
            ConfigError: it belongs to another run already.
        """
        if hasattr(self, "process"):
            raise ConfigError(
                f"{type(self).__name__} already belongs to another Trainer or Accelerator. Make a new one for each."
            )
        self.process, self.precision, self.gradient_state = process, precision, gradient_state

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.process.device

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

    def finish_evaluation(self) -> None:
        """End this process's calls of an evaluation, where it needs other processes and they it. Collective."""

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
        return prepare_loader(
            loader,
            process=self.process,
            configuration=configuration or DataLoaderConfiguration(),
            device=self.device if places else None,
            active=self.gradient_state.loaders,
            exact=exact,
            ordinal=ordinal,
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide a micro-batch's loss by the size of its window, scale it where the precision asks, and run backward.

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
        """Step a torch optimizer if gradients synchronise now, else do nothing. Unscales what is not yet unscaled."""
        if not self.gradient_state.sync_gradients:
            return StepOutcome.ACCUMULATED
        return StepOutcome.APPLIED if self.precision.step(optimizer) else StepOutcome.SKIPPED

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward does not reduce gradients over processes. Local."""
        return contextlib.nullcontext()

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context whose next backward reduces gradients, although its forward passes were under `no_sync`."""
        return contextlib.nullcontext()

    def take_part(self, model: nn.Module) -> None:
        """Take part in the reduction of gradients with zeros, in a process that has no loss to reduce. Collective."""

    def sit_out(self, model: nn.Module) -> None:
        """Take part in the passes of a micro-batch that reduces nothing, in a process that has no loss in it.
        Collective where each pass is.
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
        """Multiply gradients in place, as the exact weighting of a window needs it."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        dense = [g for g in gradients if not g.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale unscaled gradients so that their global norm is at most `max_norm`. Returns the norm before, a
        scalar.
        """
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        """Cut unscaled gradients to the range from `-value` to `value`."""
        torch.nn.utils.clip_grad_value_(list(parameters), value)

    @property
    def can_save_alone(self) -> bool:
        """Whether one process has the whole state, so that it can save it when others have failed."""
        return True

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the unwrapped model. Collective."""
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take back what `model_state` gave."""
        self.unwrap(model).load_state_dict(state, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer. Collective."""
        return optimizer.state_dict()

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take back what `optimizer_state` gave."""
        optimizer.load_state_dict(dict(state))

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """What a checkpoint keeps of this process alone: what makes its next step differ from that of others. Local."""
        return {}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Take back what `process_state` gave, after the model's and the optimizers' states. Collective."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model without what data parallelism and the compiler put around it. Nothing is changed."""
        return unwrapped(model)

    def teardown(self) -> None:
        """Free what `setup` took. Local."""
