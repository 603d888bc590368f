"""ZeRO: optimizer states, gradients and weights spread over the processes by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..data.loader import PreparedLoader
from ..distributed import watch
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.exchange import exchange
from ..distributed.kinds import DistributedType
from ..distributed.process import ProcessState
from . import deepspeed_state
from .averaging import broadcast_tensors
from .deepspeed_building import building, find_leaves, hidden_size_of, known_shapes
from .deepspeed_config import NVME, ConfigLike, offload_of
from .deepspeed_dummies import facts_of
from .deepspeed_engine import Driven, drive, driven_of, engine_of, pause, release
from .deepspeed_facts import Facts, complete
from .deepspeed_limits import check_clipping, check_same_optimizer, check_served
from .deepspeed_options import read_options
from .deepspeed_package import import_deepspeed
from .deepspeed_parts import weight_part
from .deepspeed_plugin import DeepSpeedPlugin
from .deepspeed_turns import EngineCall, EngineEntry, TurnCall
from .gradient_state import GradientState
from .memory import StrategyMemory, Surroundings
from .memory_zero import memory_of
from .outcome import StepOutcome
from .passes import Passes
from .precision import MixedPrecision, Precision
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained


@final
class DeepSpeedStrategy(Strategy):
    """Trains with DeepSpeed's ZeRO: `strategy="deepspeed"`.

    Args:
        zero_stage: 0 spreads nothing, 1 optimizer states, 2 gradients as well, 3 weights as well. None: 2, or what
            `config` says.
        offload_optimizer: keep optimizer states on `"cpu"` or `"nvme"`; with a folder as
            `{"device": "nvme", "nvme_path": ...}`.
        offload_param: the same for weights, at stage 3.
        config: DeepSpeed's own configuration: the path of a JSON file, or a mapping. `"auto"` in it is filled from the
            run.
        zero3_init: build what `configure_model` makes in parts from the beginning, at stage 3.
        moe_leaf_modules: names of module classes that stage 3 gathers as a whole, since which of their parts a batch
            uses is not known before.
        clip_norm: the largest global norm of gradients where the run asks for none. None: no limit.
        zero: further options of DeepSpeed's section `zero_optimization`, such as reduce_bucket_size, overlap_comm,
            zero_hpz_partition_size, stage3_param_persistence_threshold.
    Raises:
        ConfigError: an option can't be used, or contradicts another.
    """

    kind = DistributedType.DEEPSPEED

    def __init__(
        self,
        *,
        zero_stage: int | None = None,
        offload_optimizer: str | Mapping[str, Any] | None = None,
        offload_param: str | Mapping[str, Any] | None = None,
        config: ConfigLike | None = None,
        zero3_init: bool = False,
        moe_leaf_modules: Sequence[str] = (),
        clip_norm: float | None = None,
        **zero: Any,
    ) -> None:
        self.options = read_options(
            config, zero_stage=zero_stage, offload_optimizer=offload_optimizer, offload_param=offload_param,
            zero3_init=zero3_init, moe_leaf_modules=moe_leaf_modules, clip_norm=clip_norm, **zero,
        )  # fmt: skip
        """What was asked for, or by the plugin that was selected."""
        self._batch_size: int | None = None
        """Samples of a batch in a process, as far as a loader says it."""
        self._current: nn.Module | None = None
        """The engine of the run that goes on."""
        self._evaluated: tuple[Passes, str] | None = None
        """What is evaluated in turns now, and by which method."""

    @classmethod
    def from_plugins(cls, plugins: Mapping[str, DeepSpeedPlugin]) -> DeepSpeedStrategy:
        """The strategy with an `Accelerator`'s plugins, of which the first is used.

        Raises:
            ConfigError: an option can't be used.
        """
        strategy = cls()
        strategy.plugins = plugins
        strategy.select_plugin(next(iter(plugins.values())))
        return strategy

    def select_plugin(self, plugin: DeepSpeedPlugin) -> None:
        if self._current is not None:
            raise ConfigError("a model was set up with another DeepSpeed plugin. Select one before prepare.")
        self.options = read_options(**plugin.options())
        self.plugin = plugin
        plugin.tell_transformers()

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO."""
        return self.options.stage

    def memory(self, surroundings: Surroundings) -> StrategyMemory | None:
        return memory_of(self.options, surroundings)

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        # DeepSpeed scales the losses of fp16 itself.
        unscaled = MixedPrecision(process.device, "fp16") if precision.scales else precision
        super().attach(process, unscaled, gradient_state)

    def building(self) -> AbstractContextManager[Any]:
        if not self.options.zero3_init:
            return nullcontext()
        return building(import_deepspeed(self.device), self._completed(), self.process)

    def whole_shapes(self, model: nn.Module) -> AbstractContextManager[Any]:
        return known_shapes(model)

    @property
    def shows_weights(self) -> bool:
        return offload_of(self.options.config, "optimizer") != NVME

    def weight_part(self, model: nn.Module, parameter: Tensor) -> Tensor:
        driven = driven_of(model)
        if driven is None or driven.stage == 0 or id(parameter) not in driven.owned:
            return parameter
        return weight_part(driven, parameter)

    def show_parts(self, model: nn.Module) -> Callable[[], None]:
        driven = driven_of(model)
        if driven is None:
            return super().show_parts(model)
        with watch.collective("weights of other values"):
            return deepspeed_state.show_parts(driven)

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        known: nn.Module | None = engine_of(unwrapped(model))
        if known is not None and not optimizers:
            return known, []
        check_replicable(model)
        check_trained(model, optimizers, method)
        check_served(model, optimizers, method, self.zero_stage)
        if not optimizers:
            model.to(self.device)
            return model, []
        if self._current is not None and self._current is not known:
            raise ConfigError(
                f"{type(model).__name__} is a second model, and strategy='deepspeed' trains one, in one engine. Make "
                "an Accelerator of its own for each model, or put both into one module."
            )
        with watch.collective(f"setup of {type(model).__name__}"):
            if known is not None:
                release(known)
            engine = self._drive(model, optimizers[0], method)
        self._current = engine
        return engine, list(optimizers)

    def setup_dataloader(self, loader: Iterable[Any], *args: Any, **options: Any) -> PreparedLoader:
        """The loader for this process, as every strategy gives it. Collective."""
        if self._batch_size is None and not options.get("exact"):
            size = getattr(loader, "batch_size", None)
            self._batch_size = size if isinstance(size, int) else None
        return super().setup_dataloader(loader, *args, **options)

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        driven = driven_of(model)
        if driven is None or driven.entry is None:
            return super().training_method(model, name)
        return EngineCall(model, driven.entry, name)

    def evaluation_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        driven = driven_of(model)
        if driven is None or driven.passes is None:
            return super().evaluation_method(model, name)
        self._evaluated = driven.passes, name
        return TurnCall(driven.passes, name)

    def sit_out_evaluation(self) -> bool:
        """Make the forward pass of processes that have one more batch, if any has. Collective."""
        if self._evaluated is None or not any(exchange(False, "evaluation")):
            self._evaluated = None
            return False
        passes, name = self._evaluated
        with watch.collective(f"{name} of other processes"):
            passes.make_empty(name)
        return True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward in the engine, which reduces gradients. Collective.

        Raises:
            ConfigError: DeepSpeed does not know an option, or the window's gradients were reduced already.
        """
        driven = self._driven()
        # Divided also by 1: a tensor that the engine's forward pass gave would be divided by its own accumulation.
        loss = loss / self.gradient_state.window_size
        with watch.collective("backward"):
            driven.backward(loss, self.gradient_state.sync_gradients, **kwargs)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Let the engine step if gradients synchronise now, else do nothing. Collective.

        Raises:
            ConfigError: the optimizer is another than that of the model, or got parameters since; or no backward came
                before.
        """
        if not self.gradient_state.sync_gradients:
            return StepOutcome.ACCUMULATED
        driven = self._driven()
        if driven.optimizer is not optimizer:
            raise ConfigError(
                f"this {type(optimizer).__name__} was not set up with the model, so that DeepSpeed does not know it. "
                "Pass both in one call: accelerator.prepare(model, optimizer)."
            )
        with watch.collective("optimizer step"):
            return StepOutcome.APPLIED if driven.step() else StepOutcome.SKIPPED

    def take_part(self, model: nn.Module) -> None:
        driven = driven_of(model)
        if driven is not None:
            with watch.collective("reduction without a loss of its own"):
                driven.go_back_empty(self.gradient_state.sync_gradients)

    def sit_out(self, model: nn.Module) -> None:
        driven = driven_of(model)
        if driven is not None and driven.stage > 1:  # before, micro-batches of an open window reduce nothing
            self.take_part(model)

    def synchronize_buffers(self, model: nn.Module) -> None:
        if driven_of(model) is not None:
            broadcast_tensors(self.unwrap(model).buffers(), "broadcast of buffers")

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        self._driven().gradients_for(parameters).scale(float(factor))

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Let the gradients' global norm be at most `max_norm` in the next step. Collective.

        Returns:
            The norm before, a scalar.
        Raises:
            ConfigError: DeepSpeed's configuration has another limit, or these are not all parameters of the optimizer.
        """
        gradients = self._driven().gradients_for(parameters)
        check_clipping(self.options.config, max_norm)
        with watch.collective("clipping"):
            return gradients.clip(max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        raise ConfigError(
            f"clip_value={value}: DeepSpeed has no access to single gradients when it steps. Use clip_norm, or another "
            "strategy."
        )

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        driven = None if self._current is None else driven_of(self._current)
        return deepspeed_state.gradient_norms(driven, parameters, norm_type, self.device)

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1 or self.zero_stage == 0

    @property
    def can_go_back(self) -> bool:
        return False

    def nonfinite_weight(self, model: nn.Module) -> str | None:
        if self.zero_stage < 3 or driven_of(model) is None:
            return super().nonfinite_weight(model)
        return deepspeed_state.nonfinite_part(self.unwrap(model))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of the unwrapped model in 32 bits, of which each process has the part that it updates. Local."""
        driven = driven_of(model)
        return super().model_state(model) if driven is None else deepspeed_state.model_state(driven)

    def whole_model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the unwrapped model on the host of the main process, nothing elsewhere; in 32 bits, or in
        the 16 of the run, where stage3_gather_16bit_weights_on_model_save asks for them. Collective.
        """
        driven = driven_of(model)
        if driven is None:
            return super().model_state(model)
        with watch.collective("gathering of weights"):
            state = deepspeed_state.whole_model_state(driven, self.process.is_main_process)
        if self.options.config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save") is not True:
            return state
        return deepspeed_state.in_half(state, self.precision.name)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        with self.writing_weights(model):
            self.unwrap(model).load_state_dict(state, strict=strict)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        driven = driven_of(model)
        return nullcontext() if driven is None else deepspeed_state.writing_weights(driven)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, of which each process has the part that it updates. Local.

        Raises:
            CheckpointError: a window is open, whose gradients DeepSpeed has in parts.
        """
        driven = driven_of(model)
        if driven is None or driven.optimizer is not optimizer:
            return super().optimizer_state(model, optimizer)
        state = self.gradient_state
        if state.micro_steps % state.num_steps and driven.stage:
            raise CheckpointError(
                f"a window is open ({state.micro_steps % state.num_steps} of {state.num_steps} micro-batches), whose "
                "gradients DeepSpeed does not give. Save where accelerator.sync_gradients is true, after the step."
            )
        return deepspeed_state.optimizer_state(driven)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Put a full state, which every process has or can read, into the partitions. Local."""
        driven = driven_of(model)
        if driven is None or driven.optimizer is not optimizer:
            super().load_optimizer_state(model, optimizer, state)
        else:
            deepspeed_state.load_optimizer_state(driven, state)

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """DeepSpeed's counters and loss scale, and the buffers of a process beside the main one. Local."""
        driven = driven_of(model)
        return {} if driven is None else deepspeed_state.own_state(driven, not self.process.is_main_process)

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        driven = driven_of(model)
        if driven is not None and "engine" in state:
            deepspeed_state.load_own_state(driven, state)

    def teardown(self) -> None:
        """Let another model be trained, and leave a model that is whole without hooks. What `setup` returned keeps the
        states. Local.
        """
        if self._current is not None and self.zero_stage < 3:
            pause(self._current)
        self._current = self._evaluated = None

    def _driven(self) -> Driven:
        """The model that is trained now.

        Raises:
            ConfigError: there is none.
        """
        driven = None if self._current is None else driven_of(self._current)
        if driven is None:
            raise ConfigError("no model with its optimizer was set up. Call accelerator.prepare(model, optimizer).")
        return driven

    def _drive(self, model: nn.Module, optimizer: Optimizer, method: str | None) -> nn.Module:
        deepspeed = import_deepspeed(self.device)
        check_alike(model)
        check_same_optimizer(optimizer, model)
        leaves = find_leaves(model, self.options.moe_leaf_modules)
        if leaves and self.zero_stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, leaves)
        entry = model if method == "forward" else EngineEntry(model, method or "forward")
        config = self._completed(model, optimizer)
        engine: nn.Module = drive(deepspeed, entry, optimizer, config, self.process)
        broadcast_tensors(model.buffers(), f"setup of {type(model).__name__}")
        driven = Driven(engine, model, optimizer, self.zero_stage)
        if optimizer.state:
            deepspeed_state.load_optimizer_state(driven, optimizer.state_dict())
        return engine

    def _completed(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """The configuration with what the run knows. Local.

        Raises:
            ConfigError: they contradict each other; names both.
        """
        hyperparameters, schedule = ({}, {}) if optimizer is None else facts_of(optimizer)
        parameters = [] if model is None else list(model.parameters())
        facts = Facts(
            world_size=self.process.num_processes,
            num_steps=self.gradient_state.num_steps,
            precision=self.precision.name,
            device_type=self.device.type,
            micro_batch_size=self._batch_size,
            hidden_size=None if model is None else hidden_size_of(model),
            num_parameters=sum(vars(p).get("ds_numel", p.numel()) for p in parameters),
            clip_norm=self.options.clip_norm,
            optimizer=hyperparameters,
            schedule=schedule,
        )
        return complete(self.options.config, facts)
