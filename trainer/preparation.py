"""`Preparation`: what an `Accelerator` makes of models, optimizers, loaders and schedulers, and which it has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..data.combined import CombinedLoader
from ..data.configuration import DataLoaderConfiguration
from ..data.dispatch import DispatchedLoader
from ..data.loader import PreparedLoader
from ..data.samplers import is_skipping
from ..data.sizes import loader_length
from ..distributed.errors import ConfigError, DataError
from ..strategies.compiling import Compiling, compile_model
from ..strategies.forward import wrap_forward
from ..strategies.optimizer import GatedOptimizer, move_optimizer_state, parameters_of
from ..strategies.precision import ContextFactory
from ..strategies.recompiling import Recompilations
from ..strategies.scheduler import GatedScheduler
from ..strategies.strategy import Strategy

T = TypeVar("T")

_MARK = "_is_accelerate_prepared"


class Preparation:
    """Prepares objects for a strategy and keeps them, in the order in which they came.

    Args:
        strategy: how steps are carried out.
        configuration: of loaders.
        device_placement: whether models and batches are moved to the device.
        context: gives the contexts of forward passes; None leaves forward passes as they are.
        scales_schedules: a scheduler steps as often as there are processes at each effective call, unless a loader's
            batch size is that of all processes together.
        step_with_optimizer: whether schedulers wait for their optimizers.
        rng_types: random states that processes agree on at the beginning of each pass over a loader.
        compiling: how models are compiled; None: they are not.
    """

    def __init__(
        self,
        strategy: Strategy,
        configuration: DataLoaderConfiguration,
        *,
        device_placement: bool = True,
        context: ContextFactory | None = None,
        scales_schedules: bool = False,
        step_with_optimizer: bool = True,
        rng_types: Sequence[str] = (),
        compiling: Compiling | None = None,
    ) -> None:
        self.strategy = strategy
        self.configuration = configuration
        self.device_placement = device_placement
        self.models: list[nn.Module] = []
        self.optimizers: list[GatedOptimizer] = []
        self.schedulers: list[GatedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.recompilations = Recompilations(self.models)
        """What was compiled anew."""
        self._context = context
        self._scales_schedules = scales_schedules
        self._step_with_optimizer = step_with_optimizer
        self._rng_types = tuple(rng_types)
        self._compiling = compiling

    def prepare(self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None = None) -> list[Any]:
        """Prepare objects together: models with their optimizers and loaders first, then schedulers.

        Args:
            objects: in any order; those of another kind pass through.
            device_placement: whether each one is moved; None in it, or for all, leaves it to the default.
        Returns:
            What they became, in the same order.
        Raises:
            ConfigError: `device_placement` has another length.
        """
        places = self._places(objects, device_placement)
        results = self._models_with_optimizers(objects, places)
        for index, item in enumerate(objects):
            if isinstance(item, (DataLoader, CombinedLoader, PreparedLoader)):
                results[index] = self.loader(item, places[index])
        # Last, since a scheduler waits for the optimizer that its own became above.
        for index, item in enumerate(objects):
            if isinstance(item, (LRScheduler, GatedScheduler)):
                results[index] = self.scheduler(item)
        return results

    def model(self, model: Any, place: bool | None = None, evaluates: bool = False) -> nn.Module:
        """A model as it is called from now on.

        Args:
            model: any module.
            place: whether it is moved to the device; None: the default.
            evaluates: it will not be trained, and so is neither wrapped nor sharded by the strategy.
        Raises:
            ConfigError: it is no module.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"prepare_model got a {type(model).__name__}. Expected a torch.nn.Module.")
        if getattr(model, _MARK, False):
            return _add(self.models, model)
        return self._set_up(model, [], self._place(place), evaluates)[0]

    def optimizer(self, optimizer: Any, place: bool | None = None) -> GatedOptimizer:
        """An optimizer that steps where gradients synchronise; its state is moved to the devices of its parameters.

        Raises:
            ConfigError: it is no optimizer.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"prepare_optimizer got a {type(optimizer).__name__}. Expected a torch.optim.Optimizer.")
        if isinstance(optimizer, GatedOptimizer):
            return _add(self.optimizers, optimizer)
        if self._place(place):
            move_optimizer_state(optimizer)
        self.strategy.precision.prepare_optimizer(optimizer)
        return _add(self.optimizers, GatedOptimizer(optimizer, self.strategy))

    def scheduler(self, scheduler: Any) -> GatedScheduler:
        """A scheduler that waits for its optimizer, or for all where none of the prepared ones is its own.

        Raises:
            ConfigError: it can't step.
        """
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(f"prepare_scheduler got a {type(scheduler).__name__}. Expected an object with step().")
        if isinstance(scheduler, GatedScheduler):
            return _add(self.schedulers, scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        is_scaled = self._scales_schedules and not self.configuration.split_batches
        own = [o for o in self.optimizers if optimizer is o or optimizer is o.optimizer]
        gated = GatedScheduler(
            scheduler,
            own or self.optimizers,
            self.strategy.gradient_state,
            steps_per_call=self.strategy.data_share.num_processes if is_scaled else 1,
            step_with_optimizer=self._step_with_optimizer,
        )
        return _add(self.schedulers, gated)

    def loader(self, loader: Any, place: bool | None = None, slice_fn: Any = None) -> PreparedLoader:
        """A loader for this process: its share of the samples, on its device, with its end known. Collective.

        Args:
            loader: any iterable of batches.
            place: whether its batches are moved to the device; None: the default.
            slice_fn: cuts a process's share out of what the main process has read.
        Raises:
            ConfigError: it can't be iterated.
            DataError: it holds nothing, or no process would get a batch.
        """
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"prepare_data_loader got a {type(loader).__name__}. Expected an iterable of batches.")
        active = self.strategy.gradient_state.loaders
        if isinstance(loader, PreparedLoader):
            if loader.active is active:
                return _add(self.loaders, loader)
        elif loader_length(loader) == 0 and not is_skipping(loader):
            raise DataError(
                f"prepare got a {type(loader).__name__} that has no batch: its length is 0. Check its dataset and its "
                "sampler, and drop_last with a batch size larger than the data."
            )
        prepared = self._adapt(loader, self._place(place))
        if slice_fn is not None and isinstance(prepared.dealer, DispatchedLoader):
            prepared.dealer.slice_fn = slice_fn
        return _add(self.loaders, prepared)

    @contextmanager
    def even_batches(self, value: bool | None) -> Iterator[None]:
        """A context in which the loaders complete their last rounds or not; None leaves them as they are.

        Warns where a loader can't choose.
        """
        if value is None:
            yield
            return
        total = len(self.loaders)
        before = [(loader, kept) for loader in self.loaders if (kept := loader.even_batches) is not None]
        if len(before) < total:
            warnings.warn(
                f"even_batches={value} has no effect on {total - len(before)} of {total} prepared loaders, since the "
                "main process deals out their batches. Use DataLoaderConfiguration(dispatch_batches=False) to have "
                "each process read its own.",
                stacklevel=5,
            )
        for loader, _ in before:
            loader.even_batches = value
        try:
            yield
        finally:
            for loader, kept in before:
                loader.even_batches = kept

    def change_num_steps(self, num_steps: int) -> None:
        """Set the micro-batches per window, from the next backward on; raises ConfigError below 1."""
        self.strategy.gradient_state.change_num_steps(num_steps)
        for loader in self.loaders:
            loader.lookahead = self._lookahead

    def clear(self) -> None:
        """Forget every prepared object."""
        self.recompilations.stop()
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders):
            kept.clear()

    @property
    def _lookahead(self) -> int:
        state = self.strategy.gradient_state
        return state.num_steps if state.is_exact else 1

    def _adapt(self, loader: Any, place: bool) -> PreparedLoader:
        prepared = self.strategy.setup_dataloader(loader, self.configuration, places=place, ordinal=len(self.loaders))
        prepared.non_blocking = self.configuration.non_blocking
        prepared.lookahead = self._lookahead
        prepared.shared_generators = [*prepared.shared_generators, *self._agreed_generators()]
        return prepared

    def _agreed_generators(self) -> list[torch.Generator]:
        """The process's own generators whose state processes agree on; those of samplers are the loader's affair."""
        device = self.strategy.device
        if self.strategy.process.num_processes == 1:
            return []
        found = [torch.default_generator] if "torch" in self._rng_types else []
        if device.type == "xla" and device.type in self._rng_types:
            raise ConfigError(
                "rng_types holds 'xla', whose random state is one number and no generator. Leave it out, and call "
                "synchronize_rng_states(['xla']) where processes are to agree on it."
            )
        if device.type in self._rng_types:
            found.append(torch.get_device_module(device).default_generators[device.index or 0])
        return found

    def _models_with_optimizers(self, objects: Sequence[Any], places: Sequence[bool]) -> list[Any]:
        """Set each new model up together with its own optimizers, then those that are left; others pass through."""
        results = list(objects)
        waiting = {i: o for i, o in enumerate(objects) if _is_new_optimizer(o)}
        for index, model in enumerate(objects):
            if not isinstance(model, nn.Module):
                continue
            if getattr(model, _MARK, False):
                _add(self.models, model)
                continue
            own = [i for i, optimizer in waiting.items() if _shares_parameters(optimizer, model)]
            results[index], placed = self._set_up(model, [waiting.pop(i) for i in own], places[index])
            for i, optimizer in zip(own, placed, strict=True):
                results[i] = optimizer
        for index, item in enumerate(results):
            if isinstance(item, Optimizer):
                results[index] = self.optimizer(item, places[index])
        return results

    def _set_up(
        self, model: nn.Module, optimizers: list[Optimizer], place: bool, evaluates: bool = False
    ) -> tuple[nn.Module, list[Optimizer]]:
        self.strategy.precision.prepare_model(model)
        if self._compiling is not None:
            compile_model(model, self._compiling)
            self.recompilations.start()
        if self._context is not None:
            wrap_forward(model, self._context, self.strategy.precision.convert_inputs)
        is_dispatched = is_spread(model)
        if evaluates:
            if place and not is_dispatched:
                self.strategy.place(model)
        elif self.strategy.process.num_processes > 1 and not isinstance(model, DistributedDataParallel):
            if not (place or is_dispatched):
                _check_placed(model, self.strategy.device)
            model, optimizers = self.strategy.setup(model, optimizers)
        elif place and not is_dispatched:
            model, optimizers = self.strategy.setup(model, optimizers)
        model.__dict__[_MARK] = True
        _add(self.models, model)
        return model, optimizers

    def _places(self, objects: Sequence[Any], given: Sequence[bool | None] | None) -> list[bool]:
        if given is None:
            return [self.device_placement] * len(objects)
        if isinstance(given, bool) or len(given) != len(objects):
            raise ConfigError(
                f"prepare(device_placement={given!r}) for {len(objects)} objects. Expected a list of as many."
            )
        return [self._place(place) for place in given]

    def _place(self, place: bool | None) -> bool:
        return self.device_placement if place is None else place


def _add(kept: list[T], item: T) -> T:
    """The item, which is in the list from now on."""
    if not any(item is other for other in kept):
        kept.append(item)
    return item


def _is_new_optimizer(item: Any) -> bool:
    return isinstance(item, Optimizer) and not isinstance(item, GatedOptimizer)


def _shares_parameters(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters_of(optimizer))


def _check_placed(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that nobody moved, though processes can only train it together on their devices.

    Raises:
        ConfigError: names a parameter and where it is.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise ConfigError(
                f"device_placement=False, and parameter {name} of {type(model).__name__} is on {parameter.device}, "
                f"while this process computes on {device}. Move the model there before prepare, or leave "
                "device_placement out."
            )


def is_spread(model: nn.Module) -> bool:
    """Whether the parts of a model are on devices of their own, which moving it would undo."""
    return len(getattr(model, "hf_device_map", None) or ()) > 1
