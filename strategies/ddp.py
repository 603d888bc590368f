"""A copy of the model in each process, and gradients averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..distributed import watch
from ..distributed.errors import ConfigError, check_boolean, check_integer
from .averaging import average_gradients, broadcast_tensors
from .buckets import bucket_order, restore_bucket_order
from .buffers import load_buffers, saved_buffers
from .communication import DDPCommunicationHookType, power_tree, restore_power
from .handlers import DistributedDataParallelKwargs, KwargsHandler
from .memory import StrategyMemory, Surroundings, WholeMemory
from .optimizer import move_optimizer_state
from .outcome import StepOutcome
from .post_local import PostLocalSGD
from .replica import (
    check_reduced,
    find_replica,
    has_open_forward,
    must_reduce,
    note_backward,
    num_forward_passes,
    replicate,
    translated,
    zero_loss,
)
from .strategy import Strategy
from .suitability import (
    check_alike,
    check_batchnorm,
    check_replicable,
    check_trained,
    check_whole,
    ignores_device_maps,
    is_trainable,
    synchronised_batchnorm,
)


@final
class DDPStrategy(Strategy):
    """Trains a copy in each process with torch's `DistributedDataParallel`: `strategy="ddp"`.

    In one process it only places the model. The options are those of `DistributedDataParallelKwargs`, and:

    Args:
        sync_batchnorm: let batch norms use the statistics of all processes; on accelerators alone.
        post_local_sgd: optimizer steps after which gradients stay in their process and weights are averaged instead;
            None: never.
        post_local_sgd_period: optimizer steps from one averaging of the weights to the next.
    Raises:
        ConfigError: an option can't be used.
    """

    def __init__(
        self,
        *,
        dim: int = 0,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO,
        comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO,
        comm_state_option: Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
        post_local_sgd: int | None = None,
        post_local_sgd_period: int = 4,
    ) -> None:
        self.settings = DistributedDataParallelKwargs(
            dim=dim,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            comm_hook=comm_hook,
            comm_wrapper=comm_wrapper,
            comm_state_option=comm_state_option or {},
        )
        """What torch's wrapper is made with."""
        self.sync_batchnorm = sync_batchnorm
        """Whether batch norms use the statistics of all processes."""
        check_boolean("DDPStrategy(sync_batchnorm)", sync_batchnorm)
        self._post_local = _read_post_local(post_local_sgd, post_local_sgd_period, self.settings)
        self._replicas: list[DistributedDataParallel] = []
        self._powers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        """The state of PowerSGD for each of them, None where gradients are sent in another form."""
        self._manual: list[nn.Module] = []
        """Models whose gradients `backward` averages itself."""
        self._paused: list[nn.Module] = []
        """Those of them that are in `no_sync` now."""

    @classmethod
    def from_handler(cls, handler: DistributedDataParallelKwargs) -> DDPStrategy:
        """The strategy with the settings of an `Accelerator`'s handler."""
        return cls(**handler.to_dict())

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        check_replicable(model)
        check_whole(model)
        check_trained(model, optimizers, method)
        if not ignores_device_maps():
            model.to(self.device)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        if self.sync_batchnorm:
            model = synchronised_batchnorm(model, self.device)
        if self.process.num_processes == 1:
            return model, list(optimizers)
        check_alike(model)
        if not is_trainable(model):
            return model, list(optimizers)
        check_batchnorm(model, self.device)
        self._forget(model)
        if method is None:
            return self._set_up_manual(model), list(optimizers)
        with watch.collective(f"setup of {type(model).__name__}"):
            device = torch.device("cpu") if ignores_device_maps() else self.device
            replica = replicate(model, method, device, self.settings.to_kwargs())
        self._powers[replica] = self.settings.register_comm_hook(replica)
        if self._post_local is not None:
            self._post_local.register(replica)
        self._replicas.append(replica)
        return replica, list(optimizers)

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        return super().training_method(model, name) if find_replica(model) is None else model

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as every strategy does; gradients of models outside of `no_sync` are averaged. Collective.

        Raises:
            DistributedError: a parameter got its gradient twice, or another process failed or did not arrive.
        """
        with watch.collective("backward"):
            try:
                super().backward(loss, **kwargs)
            except RuntimeError as error:
                raise self._translated(error) or error from error
        for replica in self._replicas:
            note_backward(replica)
        for model in self._manual:
            if not any(model is paused for paused in self._paused):
                average_gradients(model.parameters(), "averaging of gradients")

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step as every strategy does. Collective where post-local SGD averages weights.

        Raises:
            DistributedError: parameters had no part in the loss, so that gradients were not averaged.
        """
        if self.gradient_state.sync_gradients:
            for replica in self._replicas:
                check_reduced(replica)
        outcome = super().step(optimizer)
        if self._post_local is not None and outcome is not StepOutcome.ACCUMULATED:
            self._post_local.after_step(optimizer)
        return outcome

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        replica = find_replica(model)
        if replica is not None:
            return nullcontext() if must_reduce(replica) else _NotReducing(replica)
        manual = self._find_manual(model)
        return nullcontext() if manual is None else self._pausing(manual)

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        replica = find_replica(model)
        return nullcontext() if replica is None else _reducing_next(replica)

    def take_part(self, model: nn.Module) -> None:
        replica = find_replica(model)
        if replica is not None:
            with watch.collective("reduction without a loss of its own"):
                # What the wrapper does around a forward pass, so that the others' collectives find their partners. A
                # forward pass whose loss was dropped has broadcast the buffers already.
                if has_open_forward(replica):
                    replica.require_forward_param_sync = False
                replica._pre_forward()  # type: ignore[no-untyped-call]
                loss = zero_loss(_reduced_alone(replica))
                loss = replica._post_forward(loss)  # type: ignore[no-untyped-call]
            self.backward(loss)
        elif self._find_manual(model) is not None:
            average_gradients(model.parameters(), "averaging of gradients")

    def check_splitting(self) -> None:
        """Accept it, but for options by which the passes of all processes, or of all steps, have to be alike. Local.

        Raises:
            ConfigError: such an option is set.
        """
        options = {"sync_batchnorm": self.sync_batchnorm, "static_graph": self.settings.static_graph}
        given = [f"{name}=True" for name, is_set in options.items() if is_set and self.process.num_processes > 1]
        if given:
            raise ConfigError(
                f"auto_accumulate=True can't be used with {' and '.join(given)} of DDPStrategy: processes may train "
                "their batches in different numbers of parts. Leave one of them out."
            )

    def share_buffers(self, model: nn.Module) -> None:
        replica = find_replica(model)
        if replica is not None and replica.require_forward_param_sync:
            with watch.collective("sharing of buffers"), _NotReducing(replica):
                replica._pre_forward()  # type: ignore[no-untyped-call]
            replica.require_forward_param_sync = False  # until the window is reduced

    def synchronize_buffers(self, model: nn.Module) -> None:
        is_shared = find_replica(model) is not None or self._find_manual(model) is not None
        if self.settings.broadcast_buffers and is_shared:
            broadcast_tensors(self.unwrap(model).buffers(), "broadcast of buffers")

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """A context in which processes that have more batches than others go on alone. Collective.

        Raises:
            ConfigError: a model is trained by manual optimization, whose collectives can't be foreseen.
        """
        from torch.distributed.algorithms.join import Join

        for model in models:
            if self._find_manual(model) is not None:
                raise ConfigError(
                    f"join_uneven_inputs can't serve {type(model).__name__}, which was set up for manual optimization. "
                    "Give all processes as many batches: DataLoaderConfiguration(even_batches=True)."
                )
        replicas = [replica for model in models if (replica := find_replica(model)) is not None]
        return Join(list(replicas)) if replicas else nullcontext()

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The order of the buckets, its own buffers, and what it knows of compressed or postponed averaging. Local."""
        replica, buffers = find_replica(model), self._own_buffers(model)
        if replica is None:
            return {"buffers": buffers}
        power = self._powers[replica]
        return {
            "buffers": buffers,
            "shares_next": replica.require_forward_param_sync,
            "buckets": bucket_order(replica),
            "power_sgd": None if power is None else power_tree(power),
            "post_local": None if self._post_local is None else self._post_local.process_state(replica, optimizers),
        }

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        load_buffers(self.unwrap(model), state.get("buffers", {}))
        replica = find_replica(model)
        if replica is None or "buckets" not in state:
            return
        replica.require_forward_param_sync = state["shares_next"]
        with watch.collective("restoring the order of gradients"):
            restore_bucket_order(replica, state["buckets"])
        power = self._powers[replica]
        if power is not None and state["power_sgd"] is not None:
            restore_power(power, state["power_sgd"], self.device)
        if self._post_local is not None and state["post_local"] is not None:
            self._post_local.load_process_state(replica, optimizers, state["post_local"])

    def _given(self) -> dict[str, Any]:
        """The options that are not the default, by name."""
        found = KwargsHandler.to_kwargs(self.settings)
        if self.sync_batchnorm:
            found["sync_batchnorm"] = True
        if self._post_local is not None:
            found |= {
                "post_local_sgd": self._post_local.warmup_steps,
                "post_local_sgd_period": self._post_local.period,
            }
        return found

    def _own_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """The buffers of a process beside the main one, where its next forward pass does not get those of the main
        process: in manual mode, where buffers are not shared, and where the newest forward pass was not the last one of
        a window.
        """
        replica = find_replica(model)
        shares_next = replica is not None and replica.require_forward_param_sync
        if self.process.is_main_process or (self.settings.broadcast_buffers and shares_next):
            return {}
        return saved_buffers(self.unwrap(model))

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        """Gradients lie in the buckets from which they are reduced, or beside them. Local."""
        options = self._given()
        if surroundings.num_processes == 1:
            return WholeMemory("ddp", options)
        in_buckets = self.settings.gradient_as_bucket_view
        return WholeMemory("ddp", options, copies=0 if in_buckets else 1, stays=in_buckets)

    def teardown(self) -> None:
        """Forget the models, whose backward averages nothing any more. Local."""
        for replica in self._replicas:
            replica._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._replicas.clear()
        self._manual.clear()
        self._paused.clear()

    def _forget(self, model: nn.Module) -> None:
        """Undo an earlier set-up of this model, whose averaging would run beside the new one."""
        inner = self.unwrap(model)
        for replica in [replica for replica in self._replicas if self.unwrap(replica) is inner]:
            replica._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self._replicas.remove(replica)
        self._manual = [known for known in self._manual if self.unwrap(known) is not inner]

    def _set_up_manual(self, model: nn.Module) -> nn.Module:
        if not self.settings.communication.is_plain or self._post_local is not None:
            raise ConfigError(
                f"{type(model).__name__} is trained by manual optimization, whose gradients are averaged as they are. "
                "Leave out comm_hook and post_local_sgd, or use automatic optimization."
            )
        broadcast_tensors([*model.parameters(), *model.buffers()], f"setup of {type(model).__name__}")
        self._manual.append(model)
        return model

    def _find_manual(self, model: nn.Module) -> nn.Module | None:
        """The model as it was set up for manual optimization, None if it was not."""
        inner = self.unwrap(model)
        return next((known for known in self._manual if self.unwrap(known) is inner), None)

    @contextmanager
    def _pausing(self, manual: nn.Module) -> Iterator[None]:
        self._paused.append(manual)
        try:
            yield
        finally:
            self._paused.pop()

    def _translated(self, error: RuntimeError) -> RuntimeError | None:
        found = (translated(error, replica) for replica in self._replicas)
        return next((translation for translation in found if translation is not None), None)


class _NotReducing:
    """A context whose backward passes reduce nothing: torch's `no_sync`, which is entered in each micro-batch."""

    __slots__ = ("_before", "_num_passes", "_replica")

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = replica

    def __enter__(self) -> None:
        replica = self._replica
        self._before, self._num_passes = replica.require_backward_grad_sync, num_forward_passes(replica)
        vars(replica)["require_backward_grad_sync"] = False  # past the bookkeeping of modules, which costs more

    def __exit__(self, *error: object) -> None:
        replica = self._replica
        vars(replica)["require_backward_grad_sync"] = self._before
        if error[0] is None and num_forward_passes(replica) > self._num_passes:
            # It has broadcast the buffers of this window. One that an exception has left early does not say so itself.
            vars(replica)["require_forward_param_sync"] = False


def _reduced_alone(replica: DistributedDataParallel) -> list[Tensor]:
    """The parameters that have a part in a reduction without a loss. Where torch looks for unused ones, those with a
    gradient, so that one that nobody uses gets none.
    """
    trained = [p for p in replica.module.parameters() if p.requires_grad]
    used = [p for p in trained if p.grad is not None] if replica.find_unused_parameters else []
    return used or trained


@contextmanager
def _reducing_next(replica: DistributedDataParallel) -> Iterator[None]:
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    replica.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before


def _read_post_local(steps: int | None, period: int, settings: DistributedDataParallelKwargs) -> PostLocalSGD | None:
    if steps is None:
        return None
    check_integer("DDPStrategy(post_local_sgd)", steps, 0, "It counts optimizer steps.")
    check_integer("DDPStrategy(post_local_sgd_period)", period, 1, "It counts optimizer steps.")
    if not settings.communication.is_plain:
        raise ConfigError(
            f"comm_hook='{settings.comm_hook}' and post_local_sgd={steps} were both given, and a model has one way to "
            "send its gradients. Leave out one of them."
        )
    return PostLocalSGD(steps, period)
