"""FP8 around another strategy: it converts the model's linear layers, and the other does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.errors import ConfigError
from .deepspeed import DeepSpeedStrategy
from .delegating import DelegatingStrategy
from .forward import ReplacedForward
from .fp8_backend import FP8Backend, make_backend
from .fp8_recipes import FP8Recipe, default_recipe, read_recipe
from .fp8_torchao import keep_states_plain, plain_part
from .fsdp import FSDPStrategy
from .gradient_state import GradientState
from .outcome import StepOutcome
from .pipeline import PipelineStrategy
from .precision import Precision, TruePrecision
from .registry import AUTO, StrategyLike, create_strategy
from .strategy import Strategy

if TYPE_CHECKING:
    from ..distributed.process import ProcessState


@final
class FP8Strategy(DelegatingStrategy):
    """Lets linear layers compute in FP8 under another strategy: `strategy="fp8"`, `"ddp+fp8"`, `"fsdp+fp8"`.

    Weights, their state dicts and checkpoints stay as they are without it. What computes is a recipe: an object, or its
    fields as options, `FP8Strategy("ddp", backend="ao", recipe="rowwise")`.

    Args:
        strategy: the other, as every strategy is given.
        recipe_kwargs: a recipe: `AORecipeKwargs`, `TERecipeKwargs` or `MSAMPRecipeKwargs`; None: of `options`, else of
            the run's precision, else the default of the first backend that is installed.
        options: `backend` (`"ao"`, `"te"`, `"msamp"`), and fields of its recipe.
    Raises:
        ConfigError: an option can't be used, or the other strategy can't work with converted layers.
    """

    converts_layers = True

    def __init__(
        self, strategy: StrategyLike = AUTO, *, recipe_kwargs: FP8Recipe | None = None, **options: Any
    ) -> None:
        if recipe_kwargs is not None and options:
            raise ConfigError(
                f"FP8Strategy got a {type(recipe_kwargs).__name__} and {sorted(options)}. Give one of them."
            )
        self.recipe = read_recipe(options, "strategy='fp8'") if options else recipe_kwargs
        """How layers are converted; None until it is attached to a run that says so."""
        self._spec = strategy
        self._inner = None if _is_open(strategy) else _checked(create_strategy(strategy))
        self._backend: FP8Backend | None = None
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """What was converted, unwrapped."""

    @property
    def inner(self) -> Strategy:
        """The other strategy.

        Raises:
            ConfigError: it goes by the number of processes, which is not known yet.
        """
        if self._inner is None:
            raise ConfigError("strategy='fp8' around 'auto': which one that is, is known once a run has it.")
        return self._inner

    @property
    def takes_several(self) -> bool:  # type: ignore[override]
        return self._inner is not None and self._inner.takes_several

    def choose_device(self, process: ProcessState) -> torch.device:
        self._resolve(process)
        return super().choose_device(process)

    def attach(self, process: ProcessState, precision: Precision, gradient_state: GradientState) -> None:
        self._resolve(process)
        _check_precision(precision)
        super().attach(process, precision, gradient_state)

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        backend, inner, own = self.backend, self.inner, self.inner.unwrap(model)
        if isinstance(inner, FSDPStrategy) and self.process.num_processes > 1:
            self._check_spread(backend)
            inner.before_sharding = backend.before_sharding
            keep_states_plain(own)
        if backend.has_context and method is None and optimizers:
            raise ConfigError(
                f"{type(own).__name__} is trained by manual optimization, and this backend of fp8 has to see whole "
                "forward passes. Use automatic optimization, or backend='ao'."
            )
        optimizers = backend.convert(own, optimizers)
        self._models[own] = None
        if backend.has_context and method == "forward":
            _wrap(own, backend)
        return inner.setup(model, optimizers, method)

    def training_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        return self._in_context(self.inner.training_method(model, name), is_training=True)

    def evaluation_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        return self._in_context(self.inner.evaluation_method(model, name), is_training=False)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step as the other strategy does. Collective where weights are gathered in FP8, whose factors it computes."""
        outcome = self.inner.step(optimizer)
        if outcome is StepOutcome.APPLIED:
            for model in self._models:
                self.backend.after_step(model)
        return outcome

    def weight_part(self, model: nn.Module, parameter: Tensor) -> Tensor:
        return plain_part(self.inner.weight_part(model, parameter))

    def show_parts(self, model: nn.Module) -> Callable[[], None]:
        own = self.unwrap(model)
        self.backend.forget_scales(own)
        show_former = self.inner.show_parts(model)

        def show() -> None:
            self.backend.forget_scales(own)
            show_former()

        return show

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        self.inner.load_model_state(model, state, strict)
        self.backend.forget_scales(self.unwrap(model))

    @contextmanager
    def writing_weights(self, model: nn.Module) -> Iterator[None]:
        with self.inner.writing_weights(model):
            yield
        self.backend.forget_scales(self.unwrap(model))

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self.inner.load_optimizer_state(model, optimizer, state)
        for values in optimizer.state.values():
            values.update({name: plain_part(v) for name, v in values.items() if isinstance(v, Tensor)})

    def teardown(self) -> None:
        """Free what `setup` took, and give models their own layers back; sharded ones stay converted. Local."""
        self.inner.teardown()
        for model in list(self._models):
            self.restore_layers(model)

    def restore_layers(self, model: nn.Module) -> None:
        own = self.inner.unwrap(model)
        if own in self._models:
            self.backend.restore(own)
            _unwrap(own)
            del self._models[own]

    @property
    def backend(self) -> FP8Backend:
        """The library that computes. The first use imports it, which takes seconds.

        Raises:
            MissingDependencyError: it is not installed.
        """
        if self._backend is None:
            given = self.recipe or getattr(self.precision, "recipe", None) or default_recipe()
            self._backend = make_backend(given, self.device, self.process.is_main_process)
        return self._backend

    def _resolve(self, process: ProcessState) -> None:
        if self._inner is None:
            self._inner = _checked(create_strategy(self._spec, process.num_processes))

    def _check_spread(self, backend: FP8Backend) -> None:
        if backend.restrictions is not None:
            raise ConfigError(f"strategy='fsdp' with fp8: {backend.restrictions}")
        sizes = self.inner.mesh_sizes
        if sizes.tensor > 1:
            raise ConfigError(
                f"fp8 with a tensor axis of {sizes.tensor}: layers that are cut can't be converted. Leave out fp8, or "
                "share the weights by 'shard' alone."
            )

    def _in_context(self, method: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
        backend = self.backend
        if not backend.has_context:
            return method

        def called(*args: Any, **kwargs: Any) -> Any:
            with backend.context(is_training):
                return method(*args, **kwargs)

        return called


class _FP8Forward(ReplacedForward):
    """A model's own forward in the context of a backend."""

    def __init__(self, module: nn.Module, backend: FP8Backend) -> None:
        super().__init__(module)
        self.backend = backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.backend.context(self.module.training):
            return self.__wrapped__(*args, **kwargs)


def _wrap(model: nn.Module, backend: FP8Backend) -> None:
    if not isinstance(model.__dict__.get("forward"), _FP8Forward):
        model.forward = _FP8Forward(model, backend)


def _unwrap(model: nn.Module) -> None:
    wrapper = model.__dict__.get("forward")
    if isinstance(wrapper, _FP8Forward):
        if wrapper.replaced is None:
            del model.forward
        else:
            model.forward = wrapper.replaced


def _is_open(strategy: StrategyLike) -> bool:
    name = strategy.get("name") if isinstance(strategy, Mapping) else strategy
    return name == AUTO


def _checked(strategy: Strategy) -> Strategy:
    """The strategy, if it can work with converted layers.

    Raises:
        ConfigError: it can't.
    """
    if isinstance(strategy, (DeepSpeedStrategy, PipelineStrategy, FP8Strategy)):
        raise ConfigError(
            f"fp8 can't be used with {type(strategy).__name__}. It goes around 'single', 'ddp' and 'fsdp', such as "
            "strategy='fsdp+fp8'. Use one of them, or precision='bf16'."
        )
    return strategy


def _check_precision(precision: Precision) -> None:
    if precision.scales or (isinstance(precision, TruePrecision) and precision.name == "fp16-true"):
        raise ConfigError(
            f"strategy='fp8' with precision={precision.name!r}: numbers of FP8 are scaled by themselves. Use 'fp8' or "
            "'bf16' (the rest in bf16), 'bf16-true', or 'no'."
        )
