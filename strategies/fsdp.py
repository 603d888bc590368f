"""A part of each weight in each process: gathered where it is needed, and freed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..distributed import watch
from ..distributed.errors import ConfigError, DataError, check_boolean, check_integer
from ..distributed.exchange import exchange
from . import sharded_state
from .averaging import average_gradients
from .optimizer import move_optimizer_state
from .outcome import StepOutcome
from .passes import Entry, Passes
from .recompute import recompute
from .sharded_gradients import clip_norm, local_gradients
from .sharded_model import Called, Sharded, free_after_evaluation, syncing
from .sharded_options import read_format, read_mesh
from .sharding import (
    as_full_precision,
    bring_buffers,
    bring_values,
    check_formats,
    check_shardable,
    find_ignored,
    forget_accumulated,
    held_parameters,
    make_mesh,
    owned_parameters,
    shard,
)
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained, is_trainable
from .wrapping import AUTO, WrapPolicy, check_policy, find_units

_OF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FLAGS = ("reshard_after_forward", "cpu_offload", "activation_checkpointing", "find_unused_parameters")


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
        mesh: `(copies, parts)`: spread over groups of `parts` processes, and average over the `copies` of such groups.
        activation_checkpointing: units keep no activations but their inputs, and compute them again in backward.
        param_dtype: in which format units compute: `"fp32"`, `"bf16"`, `"fp16"`. None: that of the run's precision.
            Trained weights themselves are in fp32 then.
        reduce_dtype: in which format gradients are reduced. None: fp32.
        output_dtype: of what the model gives. None: as it comes.
        prefetch: units whose weights are gathered ahead in forward, in the order in which the model holds them.
        ignored_modules: modules that stay whole in each process: themselves, or patterns that match their names.
        find_unused_parameters: reduce zeros for parameters that have no part in a loss, where processes use different
            ones.
    Raises:
        ConfigError: an option can't be used.
    """

    def __init__(
        self,
        *,
        wrap: WrapPolicy = AUTO,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        mesh: Sequence[int] | None = None,
        activation_checkpointing: bool = False,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        prefetch: int = 0,
        ignored_modules: Sequence[str | nn.Module] = (),
        find_unused_parameters: bool = False,
    ) -> None:
        check_policy("FSDPStrategy(wrap)", wrap)
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.find_unused_parameters = find_unused_parameters
        for name in _FLAGS:
            check_boolean(f"FSDPStrategy({name})", getattr(self, name))
        self.mesh = read_mesh(mesh)
        self.param_dtype = read_format("param_dtype", param_dtype)
        self.reduce_dtype = read_format("reduce_dtype", reduce_dtype)
        self.output_dtype = read_format("output_dtype", output_dtype)
        check_integer("FSDPStrategy(prefetch)", prefetch, 0, "It counts units.")
        self.prefetch = prefetch
        if isinstance(ignored_modules, (str, nn.Module)):
            raise ConfigError(f"FSDPStrategy(ignored_modules={ignored_modules!r:.80}). Expected a list.")
        self.ignored_modules = tuple(ignored_modules)
        self._models: list[Sharded] = []
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Optimizers that were compared with the models, and how many parameters they had."""
        self._evaluated: tuple[Sharded, str] | None = None
        """The model that is evaluated now, and by which method."""

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        known = self._find(model)
        if known is not None:
            return self._set_up_again(known, optimizers, method)
        check_replicable(model)
        check_trained(model, optimizers, method)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            sharded_state.check_parameters(optimizer, model, names)
        if self.process.num_processes == 1:
            return self._place(model, optimizers)
        if method == "forward" and not optimizers and is_trainable(model):
            raise ConfigError(
                f"{type(model).__name__} was set up without its optimizer, and strategy='fsdp' replaces the parameters "
                "that an optimizer holds. Pass both in one call: accelerator.prepare(model, optimizer); for a model "
                "that is only evaluated, prepare_model(model, evaluation_mode=True)."
            )
        _check_automatic(model, optimizers, method)
        with watch.collective(f"setup of {type(model).__name__}"):
            found = self._shard(model, method)
        for optimizer in optimizers:
            sharded_state.rebuild(optimizer, model, names)
        self._models.append(found)
        return found.entry, list(optimizers)

    def setup_dataloader(
        self,
        loader: Iterable[Any],
        configuration: DataLoaderConfiguration | None = None,
        *,
        exact: bool = False,
        places: bool = True,
        ordinal: int = 0,
    ) -> PreparedLoader:
        """The loader for this process, as every strategy gives it. Collective.

        Raises:
            DataError: processes would have different numbers of batches in an accumulation window.
        """
        prepared = super().setup_dataloader(loader, configuration, exact=exact, places=places, ordinal=ordinal)
        accumulates = self.gradient_state.num_steps > 1
        if accumulates and not exact and self.process.num_processes > 1 and not prepared.is_even:
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

    def finish_evaluation(self) -> None:
        """Make the forward passes of processes that have more batches, until all are done. Collective."""
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is None:
            return
        found, name = evaluated
        assert found.passes is not None
        while any(exchange(False, "evaluation")):
            with watch.collective(f"{name} of other processes"):
                found.passes.make_empty(name)
                found.entry.reshard()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as every strategy does, which gathers weights and reduces gradients. Collective."""
        with watch.collective("backward"):
            super().backward(loss, **kwargs)
        for found in self._models:
            if found.passes is not None:
                found.passes.went_back()
            self._reduce_whole(found)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step as every strategy does. Local.

        Raises:
            ConfigError: the optimizer holds parameters that were replaced when their model was sharded.
        """
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._models and self._checked.get(optimizer) != num_parameters and self.gradient_state.sync_gradients:
            known = {id(p): None for found in self._models for p in found.model.parameters()}
            sharded_state.check_parameters(optimizer, self._models[-1].model, known)
            self._checked[optimizer] = num_parameters
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
            with watch.collective("passes without a loss of its own"):
                found.passes.make_empty(found.entry.method)
            self._reduce_whole(found)

    def sit_out(self, model: nn.Module) -> None:
        self.take_part(model)

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().forget_gradients(model, optimizer)
        found = self._find(model)
        if found is not None:
            forget_accumulated(found.entry)

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

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the unwrapped model on the host of the main process, nothing elsewhere. Collective."""
        self._reshard(model)
        return sharded_state.whole_model_state(self.unwrap(model), self.process.is_main_process)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Put a full state, which every process has, into the parts of each. Local."""
        self._reshard(model)
        sharded_state.load_model_state(self.unwrap(model), state, strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer on the host of the main process, elsewhere its groups alone. Collective."""
        return sharded_state.whole_optimizer_state(optimizer, self.process.is_main_process)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Put a full state, which every process has, into the parts of each. Local."""
        sharded_state.load_optimizer_state(optimizer, state)

    def _find(self, model: nn.Module) -> Sharded | None:
        inner = unwrapped(model)
        return next((found for found in self._models if found.model is inner), None)

    def _reshard(self, model: nn.Module) -> None:
        """Free what a forward pass without backward has left whole. Local."""
        found = self._find(model)
        if found is not None:
            found.entry.reshard()

    def _place(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        model.to(self.device)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        if self.activation_checkpointing:
            for unit in find_units(model, self.wrap):
                recompute(unit)
        return model, list(optimizers)

    def _set_up_again(
        self, known: Sharded, optimizers: Sequence[Optimizer], method: str | None
    ) -> tuple[nn.Module, list[Optimizer]]:
        _check_automatic(known.model, optimizers, method)
        known.entry.reshard()
        own = {id(parameter): None for parameter in known.model.parameters()}
        for optimizer in optimizers:
            sharded_state.check_parameters(optimizer, known.model, own)
        if method not in (None, known.entry.method if known.passes else "forward"):
            if known.passes is None:
                raise ConfigError(f"{type(known.model).__name__} was sharded for its forward alone. Make it anew.")
            known.entry.method = method
        return known.entry, list(optimizers)

    def _shard(self, model: nn.Module, method: str | None) -> Sharded:
        check_alike(model)
        check_shardable(model, self.process.is_main_process)
        ignored = find_ignored(model, self.ignored_modules)
        left = {parameter for module in ignored for parameter in module.parameters()}
        units = find_units(model, self.wrap, ignored)
        entry = model if method == "forward" else Entry(model, method or "forward")
        owned = owned_parameters(entry, {*units}, ignored)
        if self._compute_format is not None:
            as_full_precision(owned)
        check_formats(owned)
        if self.activation_checkpointing:
            for unit in units:
                recompute(unit)
        bring_buffers(model, self.device)
        bring_values(held_parameters(ignored), self.device)
        shard([*units, entry], owned, self.device, self._options(left))
        self._order(entry, units)
        passes = Passes(entry, owned, self.device) if isinstance(entry, Entry) else None
        if passes is None:
            entry.register_forward_hook(free_after_evaluation)
        whole = [parameter for module in ignored for parameter in module.parameters() if parameter.requires_grad]
        return Sharded(model, entry, passes, whole)

    @property
    def _compute_format(self) -> torch.dtype | None:
        return self.param_dtype or _OF_PRECISION.get(self.precision.name)

    def _options(self, ignored: set[nn.Parameter]) -> dict[str, Any]:
        """What `fully_shard` is given."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        computes = self._compute_format
        reduces = self.reduce_dtype or (None if computes is None else torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=reduces)
        # Under autocast the outermost unit's inputs, targets among them, stay as they are.
        outer = MixedPrecisionPolicy(computes, reduces, self.output_dtype, not self.precision.autocasts)
        outermost = {"mp_policy": outer, "reshard_after_forward": None if self.reshard_after_forward else False}
        options: dict[str, Any] = {
            "mesh": make_mesh(self.device, self.process.num_processes, self.mesh),
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": policy,
            "outermost": outermost,
        }
        if ignored:
            options["ignored_params"] = ignored
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        return options

    def _order(self, entry: Any, units: Sequence[nn.Module]) -> None:
        """Tell units what else to do around their passes."""
        entry.set_reduce_scatter_unused_params(self.find_unused_parameters)
        held = [module for module in entry.modules() if module in {*units}]
        for index, unit in enumerate(held if self.prefetch else ()):
            following: Any = held[index + 1 : index + 1 + self.prefetch]
            sharded: Any = unit
            sharded.set_modules_to_forward_prefetch(following)

    def _reduce_whole(self, found: Sharded) -> None:
        """Average the gradients of ignored modules, which no unit reduces. Collective where there are some."""
        if found.syncs and found.whole:
            average_gradients(found.whole, "averaging of gradients")


def _check_automatic(model: nn.Module, optimizers: Sequence[Optimizer], method: str | None) -> None:
    if method is None and optimizers:
        raise ConfigError(
            f"{type(model).__name__} is trained by manual optimization, which strategy='fsdp' can't serve: a loss goes "
            "backward there before the forward pass of the whole task has ended. Use automatic optimization, or 'ddp'."
        )
