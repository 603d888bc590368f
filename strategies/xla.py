"""Training on XLA devices, such as TPUs, by torch_xla."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..distributed import xla
from ..distributed.errors import ConfigError, check_boolean
from ..distributed.kinds import DistributedType
from ..distributed.process import ProcessState
from .averaging import average_gradients, broadcast_tensors
from .buffers import load_buffers, saved_buffers
from .gradient_state import GradientState
from .outcome import StepOutcome
from .precision import Precision
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained, check_whole
from .wrapping import WrapPolicy, check_policy
from .xla_launch import launch
from .xla_loading import BatchShapes, XLATransfer, unwrapped_loader, uploader
from .xla_mesh import XLAMesh
from .xla_moving import check_optimizer, follow, move_model, on_host


@final
class XLAStrategy(Strategy):
    """Trains on XLA devices by torch_xla: `strategy="xla"`.

    What is computed is recorded, and runs as one program at the edge of each micro-batch and of each step. Several
    processes have a copy of the model each, and their gradients are averaged once in a step.

    Args:
        spmd: one process computes on all devices; batches are cut over them, each device has the whole weights.
        fsdp: and each device has a part of the weights, of gradients and of optimizer states. It implies `spmd`.
        wrap: with `fsdp`, which modules are units, as `FSDPStrategy` has it.
        warn_of_shapes: warn once for each loader whose batches change their shapes, as each is compiled anew.
    Raises:
        ConfigError: an option can't be used.
    """

    kind = DistributedType.XLA

    def __init__(
        self, *, spmd: bool = False, fsdp: bool = False, wrap: WrapPolicy = "auto", warn_of_shapes: bool = True
    ) -> None:
        check_boolean("XLAStrategy(spmd)", spmd)
        check_boolean("XLAStrategy(fsdp)", fsdp)
        check_boolean("XLAStrategy(warn_of_shapes)", warn_of_shapes)
        check_policy("XLAStrategy(wrap)", wrap)
        self.spmd, self.fsdp, self.wrap, self.warn_of_shapes = spmd or fsdp, fsdp, wrap, warn_of_shapes
        self._mesh: XLAMesh | None = None
        self._models: list[nn.Module] = []
        self._paused: list[nn.Module] = []
        """Those of them that are in `no_sync` now."""
        self._is_triggered = False
        """Whether the next backward averages although the window goes on."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        """All that were set up: they follow each of their models to the device."""
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many parameters an optimizer had when it was checked."""

    launch = staticmethod(launch)

    def choose_device(self, process: ProcessState) -> torch.device:
        device = xla.choose_device(process.place, spmd=self.spmd)
        self._mesh = XLAMesh() if self.spmd else None
        return device

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        super().attach(process, precision, gradient_state)
        if precision.scales:
            raise ConfigError("precision='fp16': XLA devices compute in bf16, which needs no scaling. Use 'bf16'.")

    def place(self, model: nn.Module) -> None:
        follow(self._optimizers, move_model(model, self.device))

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        check_replicable(model)
        check_whole(model)
        check_trained(model, optimizers, method)
        self._optimizers.update(optimizers)
        self.place(model)
        if self.process.num_processes > 1:
            check_alike(model)
            broadcast_tensors([*model.parameters(), *model.buffers()], f"setup of {type(model).__name__}")
        if self._mesh is not None and self.fsdp:
            self._mesh.shard(model, self.wrap)
        inner = self.unwrap(model)
        if not any(known is inner for known in self._models):
            self._models.append(inner)
        xla.sync()
        return model, list(optimizers)

    def setup_dataloader(
        self,
        loader: Iterable[Any],
        configuration: DataLoaderConfiguration | None = None,
        *,
        exact: bool = False,
        places: bool = True,
        ordinal: int = 0,
    ) -> PreparedLoader:
        loader = unwrapped_loader(loader)
        prepared = super().setup_dataloader(loader, configuration, exact=exact, places=places, ordinal=ordinal)
        shapes = BatchShapes(type(loader).__name__ if self.warn_of_shapes else None)
        upload = uploader(self.device, None if self._mesh is None else self._mesh.sharding_of)
        prepared.make_transfer = partial(XLATransfer, self.device, shapes, upload)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as every strategy does. Where gradients synchronise they are averaged over processes
        (collective); else the micro-batch runs now, so that programs don't grow with the accumulation.
        """
        super().backward(loss, **kwargs)
        if not (self.gradient_state.sync_gradients or self._is_triggered):
            xla.sync()
            return
        self._average()

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step as every strategy does, and run what was recorded.

        Raises:
            ConfigError: the optimizer has parameters that are not on the device.
        """
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) != count:
            check_optimizer(optimizer, self.device)
            self._checked[optimizer] = count
        outcome = super().step(optimizer)
        if outcome is not StepOutcome.ACCUMULATED:
            xla.sync()
        return outcome

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._pausing(self.unwrap(model))

    @contextmanager
    def _pausing(self, model: nn.Module) -> Iterator[None]:
        self._paused.append(model)
        try:
            yield
        finally:
            self._paused.pop()

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._averaging()

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        paused, self._paused, self._is_triggered = self._paused, [], True
        try:
            yield
        finally:
            self._paused, self._is_triggered = paused, False

    def take_part(self, model: nn.Module) -> None:
        self._average()

    def synchronize_buffers(self, model: nn.Module) -> None:
        if self.process.num_processes > 1:
            broadcast_tensors(self.unwrap(model).buffers(), "broadcast of buffers")

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Not here: all processes run the same programs.

        Raises:
            ConfigError: there are several processes.
        """
        if self.process.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs: processes with XLA devices all run the same steps. Give them as many batches: "
                "DataLoaderConfiguration(even_batches=True)."
            )
        return super().join(models)

    @property
    def can_go_back(self) -> bool:
        return False

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        xla.sync()
        state: dict[str, Any] = on_host(self.unwrap(model).state_dict(keep_vars=True))
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state(model, state, strict)
        self._settle(model)

    @contextmanager
    def _writing(self, model: nn.Module) -> Iterator[None]:
        yield
        self._settle(model)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._writing(model)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        xla.sync()
        state: dict[str, Any] = on_host(optimizer.state_dict())
        return state

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_optimizer_state(model, optimizer, state)
        xla.sync()

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The buffers of a process beside the main one: each has its own while it trains. Local."""
        buffers = {} if self.process.is_main_process else saved_buffers(self.unwrap(model))
        return {"buffers": on_host(buffers)}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        load_buffers(self.unwrap(model), state.get("buffers", {}))
        xla.sync()

    def teardown(self) -> None:
        """Forget the models, whose backward averages nothing any more. Local."""
        self._models.clear()
        self._paused.clear()

    def _settle(self, model: nn.Module) -> None:
        """Cut weights again that were written whole, and bring them to the device. Local."""
        if self._mesh is not None and self.fsdp:
            self._mesh.mark(self.unwrap(model).parameters())
        xla.sync()

    def _average(self) -> None:
        """Average the gradients of all models that are not in `no_sync`; those that are averaged already stay so."""
        if self.process.num_processes == 1:
            return
        models = [model for model in self._models if not any(model is paused for paused in self._paused)]
        parameters = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
        if xla.is_connected(self.process.num_processes):
            reduce_gradients(parameters, self.process.num_processes)
        else:  # each runtime has its own device alone: over the host
            average_gradients(parameters, "averaging of gradients")


def reduce_gradients(parameters: Sequence[Tensor], num_processes: int) -> None:
    """Replace gradients by their means over processes, as a part of the recorded program. Collective.

    Args:
        parameters: the same on all processes; one without a gradient gets 0, so that all record the same.
        num_processes: how many there are.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    model = xla.load("core.xla_model")
    model.all_reduce(model.REDUCE_SUM, [parameter.grad for parameter in parameters], scale=1.0 / num_processes)
