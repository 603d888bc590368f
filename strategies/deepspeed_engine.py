"""A model in DeepSpeed's engine, with the optimizer that the user has and the one that DeepSpeed steps."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError, DistributedError
from ..distributed.process import ProcessState
from .deepspeed_dummies import DummyOptim, scheduler_of
from .deepspeed_gradients import WindowGradients, gradients_of
from .deepspeed_limits import check_dummies, check_readable
from .deepspeed_nvme import check_nvme
from .deepspeed_package import connect_deepspeed, launched
from .deepspeed_turns import ArrivalOrder, EngineEntry, passes_of
from .optimizer import parameters_of

_DRIVEN = "_loopwright_driven"
"""The attribute of an engine that holds its `Driven`."""
_ENGINE = "_loopwright_engine"
"""The attribute of a model's first trained parameter that leads to its engine."""


class Driven:
    """One model in an engine.

    DeepSpeed gives the optimizer that it gets partitions in the place of the model's parameters. So it gets a copy,
    and the user's keeps parameters and hyperparameters: schedulers, checkpoints and callbacks see what they know from
    other strategies. Before each step the copy takes its hyperparameters, and after it what the step has changed. The
    user's `zero_grad` reaches the partitions' gradients.

    Args:
        engine: DeepSpeed's.
        model: as it was given.
        optimizer: the user's.
        stage: of ZeRO.
    """

    def __init__(self, engine: Any, model: nn.Module, optimizer: Optimizer, stage: int) -> None:
        vars(engine)[_DRIVEN] = self
        self._engine = weakref.ref(engine)
        self.model = model
        self.optimizer = optimizer
        self.stage = stage
        self.indices = [index for index, group in enumerate(optimizer.param_groups) if _trained(group)]
        """Of the user's groups those that DeepSpeed has."""
        self.groups = [_trained(optimizer.param_groups[index]) for index in self.indices]
        """Their trained parameters."""
        self.parameters = [parameter for group in self.groups for parameter in group]
        self.gradients: WindowGradients = gradients_of(engine.optimizer, stage, self.parameters)
        self.arrivals = ArrivalOrder(self.parameters)
        entry = engine.module
        self.entry = entry if isinstance(entry, EngineEntry) else None
        self.passes = passes_of(self.entry, engine.device) if stage == 3 and self.entry is not None else None
        """Makes the passes of evaluations, where the weights are in parts."""
        self.owned = {id(p): place for place, group in enumerate(self.groups) for p in group}
        """The places among DeepSpeed's groups of the parameters that it has, by `id`."""
        vars(self.parameters[0])[_ENGINE] = self._engine
        self._num_given = _count(optimizer)
        self._is_pending = self._is_reduced = False
        """Whether there are gradients that no step has used, and whether these are those of a whole window."""
        vars(optimizer)["zero_grad"] = _zero_grad_of(self)
        if isinstance(optimizer, DummyOptim) or scheduler_of(optimizer) is not None:
            self._pull()  # what DeepSpeed's configuration says

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""
        return self._engine()

    @property
    def stepped(self) -> Optimizer:
        """The torch optimizer that DeepSpeed steps, whose parameters are partitions from stage 1 on."""
        optimizer = self.engine.optimizer
        inner: Optimizer = optimizer.optimizer if self.stage else optimizer
        return inner

    def gradients_for(self, parameters: Iterable[Tensor]) -> WindowGradients:
        """The gradients of these parameters, which are all that are trained. Local.

        Raises:
            ConfigError: some are left out.
        """
        given = {id(parameter) for parameter in parameters}
        if missing := sum(1 for parameter in self.parameters if id(parameter) not in given):
            raise ConfigError(
                f"{missing} of {len(self.parameters)} parameters were left out, and DeepSpeed takes the gradients of "
                "all together. Pass model.parameters()."
            )
        return self.gradients

    def backward(self, loss: Tensor, is_boundary: bool, **kwargs: Any) -> None:
        """Backward of a loss that is divided by its window's size already. Collective.

        Raises:
            ConfigError: DeepSpeed does not know an option, or the window's gradients were reduced already.
        """
        engine = self.engine
        if unknown := sorted(kwargs.keys() - {"retain_graph"}):
            raise ConfigError(f"backward({unknown[0]}=...): DeepSpeed takes retain_graph alone. Leave it out.")
        if self._is_reduced and self.stage:
            raise ConfigError(
                "backward was called twice in the last micro-batch of a window, and DeepSpeed has reduced gradients in "
                "the first. Call it once, with the sum of the losses; where a step is left out, call zero_grad."
            )
        self._is_pending, self._is_reduced = True, is_boundary
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.arrivals.went_back()

    def go_back_empty(self, is_boundary: bool) -> None:
        """Backward with zeros, where other processes have a loss. Collective.

        Raises:
            DistributedError: weights are in parts, or there was no backward yet.
        """
        if self.stage == 3:
            raise DistributedError(
                "this process has no loss in a micro-batch in which others may have one, or leaves a window before its "
                "backward, and at ZeRO stage 3 all processes make each pass together. Return a loss for each batch, "
                "give all processes as many batches, or use zero_stage=2 or strategy='fsdp'."
            )
        self.backward(self.engine(None, self.arrivals.zero_loss), is_boundary)

    def step(self) -> bool:
        """Step the optimizer. Collective.

        Returns:
            Whether the weights were updated: they are not where a gradient is not finite.
        Raises:
            ConfigError: the user's optimizer got other parameters since it was set up, or they were frozen or unfrozen;
                or no gradients were reduced.
        """
        if (now := _count(self.optimizer)) != self._num_given:
            what = "got parameters" if now[0] != self._num_given[0] else "had parameters frozen or unfrozen"
            raise ConfigError(
                f"{type(self.optimizer).__name__} {what} after it was set up, and strategy='deepspeed' has partitioned "
                "what it was given to train. Give it all of that at once; a learning rate of 0 holds a group back."
            )
        if self.stage and not self._is_reduced:
            raise ConfigError(
                f"{type(self.optimizer).__name__}.step() without a backward before it, in which DeepSpeed reduces "
                "gradients. Call accelerator.backward(loss) before each step."
            )
        self._push()
        engine = self.engine
        try:
            engine.step()
        finally:
            self._is_pending = self._is_reduced = False
            self.gradients.after_step()
        self._pull()
        # torch's schedules look here whether a step came before theirs; it was another object's.
        vars(self.optimizer)["_opt_called"] = True
        applied: bool = engine.was_step_applied()
        return applied

    def forget(self) -> None:
        """Drop the gradients that no step has used. Local."""
        if self._is_pending:
            self._is_pending = self._is_reduced = False
            self.gradients.forget()

    def _push(self) -> None:
        for index, group in zip(self.indices, self.stepped.param_groups, strict=True):
            group.update(_hyperparameters(self.optimizer.param_groups[index]))

    def _pull(self) -> None:
        for index, group in zip(self.indices, self.stepped.param_groups, strict=True):
            self.optimizer.param_groups[index].update(_hyperparameters(group))


def driven_of(engine: object) -> Driven | None:
    """What was kept of an engine's model; None for anything else. Local."""
    found = vars(engine).get(_DRIVEN)
    return found if isinstance(found, Driven) else None


def engine_of(model: nn.Module) -> Any:
    """The engine in which a model is or was trained, as long as somebody holds it; None without one. Local."""
    for parameter in model.parameters():
        found = vars(parameter).get(_ENGINE)
        if found is not None and (engine := found()) is not None and driven_of(engine) is not None:
            return engine
    return None


def pause(engine: Any) -> None:
    """Take DeepSpeed's hooks off a model that is whole in each process, so that it is a usual one. Local.

    What the engine has of the optimizer's state stays.
    """
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    driven = driven_of(engine)
    if driven is not None and driven.stage in (1, 2):
        for hook in engine.optimizer._grad_acc_hooks:
            hook.remove()


def release(engine: Any) -> None:
    """End an engine, whose model gets another one. Local."""
    from deepspeed.runtime.zero import parameter_offload

    driven = driven_of(engine)
    if driven is not None and driven.stage == 3:
        engine.optimizer._partition_all_parameters()  # those as well that it gathers ahead
    pause(engine)
    engine.destroy()
    if driven is not None:
        del driven.optimizer.zero_grad
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    vars(engine).pop(_DRIVEN, None)


def drive(
    deepspeed: Any, entry: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], process: ProcessState
) -> Any:
    """DeepSpeed's engine for a model and a copy of its optimizer. Collective.

    Args:
        deepspeed: the package.
        entry: the model, or what calls a method of it.
        optimizer: the user's, or a `DummyOptim` where DeepSpeed makes one.
        config: complete.
        process: this one.
    Raises:
        ConfigError: optimizer or scheduler and configuration do not belong together, or DeepSpeed refuses these.
    """
    check_dummies(optimizer, config)
    scheduler = scheduler_of(optimizer)
    trained = {index: found for index, group in enumerate(optimizer.param_groups) if (found := _trained(group))}
    given: dict[str, Any] = {}
    if isinstance(optimizer, DummyOptim):
        given["model_parameters"] = [{"params": p, **optimizer.explicit(index)} for index, p in trained.items()]
    else:
        groups = [{**optimizer.param_groups[index], "params": p} for index, p in trained.items()]
        given["optimizer"] = _copy(optimizer, groups)
    if scheduler is not None and scheduler.lr_scheduler_callable is not None:
        given["lr_scheduler"] = scheduler.lr_scheduler_callable
    connect_deepspeed(deepspeed, process.device)
    check_readable(deepspeed, config)
    check_nvme(config)
    with launched(process.local_process_index):
        engine = deepspeed.initialize(model=entry, config=dict(config), dist_init_required=False, **given)[0]
    if config["zero_optimization"].get("stage") == 3 and "LOCAL_RANK" not in os.environ:
        _launch_passes(engine.module, process.local_process_index)
    if scheduler is not None:
        scheduler.attach(engine.lr_scheduler)
    return engine


def _launch_passes(module: nn.Module, local_index: int) -> None:
    """Let DeepSpeed find this process's place also around forward passes, where it compares parts. Local."""
    contexts = ExitStack()

    def begin(*_: Any) -> None:
        contexts.close()
        contexts.enter_context(launched(local_index))

    def end(*_: Any) -> None:
        contexts.close()

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)


def _copy(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """An optimizer with the same hyperparameters and hooks, and no state."""
    inner: Optimizer = object.__new__(type(optimizer))
    # A scheduler replaces the method by one of the original.
    vars(inner).update({name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")})
    inner.param_groups = list(groups)
    inner.state = defaultdict(dict)
    return inner


def _count(optimizer: Optimizer) -> tuple[int, int]:
    """The parameters of an optimizer, and those of them that are trained."""
    parameters = parameters_of(optimizer)
    return len(parameters), sum(1 for parameter in parameters if parameter.requires_grad)


def _zero_grad_of(driven: Driven) -> Callable[..., None]:
    """A `zero_grad` for the user's optimizer. It holds neither that nor the engine."""
    known, owner = weakref.ref(driven), weakref.ref(driven.optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        optimizer, driven = owner(), known()
        assert optimizer is not None
        type(optimizer).zero_grad(optimizer, **({} if set_to_none else {"set_to_none": False}))
        if driven is not None:
            driven.forget()

    return zero_grad


def _trained(group: Mapping[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.requires_grad]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
