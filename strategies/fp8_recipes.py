"""Recipes of FP8: what computes the matrix products of linear layers in 8 bits, and how. The names are Accelerate's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import nn

from ..distributed.environment import read_flag, read_int, read_text, read_variable
from ..distributed.errors import ConfigError, MissingDependencyError, check_boolean, check_integer, suggest
from ..distributed.imports import is_installed
from .fp8_words import AMAX_ALGORITHMS, BACKENDS, FORMATS, OPT_LEVELS
from .handlers import Handlers, KwargsHandler

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")
"""torchao's ways of scaling: one factor per tensor, per row, per row with gradients of weights in high precision, per
block of 32, and the same with these gradients in high precision."""

LayerFilter: TypeAlias = Callable[[nn.Module, str], bool]
"""Is given a module and its name, and says whether it is converted."""


class RecipeKwargs:
    """Base of the recipes. It is no dataclass itself, so that command lines don't look for fields in it."""

    __slots__ = ()

    backend: ClassVar[str]
    """Accelerate's word for what computes."""


@dataclass(frozen=True, slots=True)
class AORecipeKwargs(KwargsHandler, RecipeKwargs):
    """FP8 by torchao.

    Raises:
        ConfigError: a field can't be used.
    """

    backend: ClassVar[str] = "ao"

    config: Any = None
    """torchao's own `Float8LinearConfig`, in the place of `recipe`."""
    module_filter_func: LayerFilter | None = None
    """Says which linear layers are converted; then the first and the last one are as well, if it says so. None: all."""
    pad_inner_dim: bool | None = None
    """Fill the inner dimensions of products up to multiples of 16. None: yes."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather weights in FP8 under FSDP, with one factor per tensor. None: where devices are accelerators."""
    recipe: str = "tensorwise"
    """One of `TORCHAO_RECIPES`."""
    emulate: bool | None = None
    """Round to FP8 and compute in high precision. None: where the device can't compute in FP8, with a warning."""
    first_and_last: bool = False
    """Convert the first and the last linear layer of a model too."""
    skip: Sequence[str] = ()
    """Regular expressions that match the whole names of layers that stay as they are."""

    def __post_init__(self) -> None:
        if self.recipe not in TORCHAO_RECIPES:
            raise ConfigError(
                f"AORecipeKwargs(recipe={self.recipe!r}) is unknown. {suggest(self.recipe, TORCHAO_RECIPES)}"
            )
        if self.config is not None and self.recipe != "tensorwise":
            raise ConfigError(f"AORecipeKwargs(recipe={self.recipe!r}) and config were both given. Give one of them.")
        if self.config is None:
            _fill(self, "pad_inner_dim", read_flag("FP8_PAD_INNER_DIM"), True)
            found = read_flag("FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")
            _fill(self, "enable_fsdp_float8_all_gather", found, None)
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather", "emulate"):
            if getattr(self, name) is not None:
                check_boolean(f"AORecipeKwargs({name})", getattr(self, name))
        check_boolean("AORecipeKwargs(first_and_last)", self.first_and_last)
        _check_choice("AORecipeKwargs", self.module_filter_func, self.skip)
        if self.enable_fsdp_float8_all_gather and not self.is_tensorwise:
            raise ConfigError(
                f"AORecipeKwargs(recipe={self.recipe!r}, enable_fsdp_float8_all_gather=True): weights are gathered in "
                "FP8 with one factor per tensor alone. Use recipe='tensorwise', or leave one of them out."
            )

    @property
    def is_tensorwise(self) -> bool:
        """Whether weights have one factor per tensor."""
        if self.config is None:
            return self.recipe == "tensorwise"
        return bool(self.config.cast_config_weight.scaling_granularity.value == "tensorwise")


@dataclass(frozen=True, slots=True)
class TERecipeKwargs(KwargsHandler, RecipeKwargs):
    """FP8 by NVIDIA's Transformer Engine. What is None is read from its variable, else has the default that it names.

    Raises:
        ConfigError: a field can't be used.
    """

    backend: ClassVar[str] = "te"

    use_autocast_during_eval: bool | None = None
    """Compute in FP8 in evaluations too. None: no."""
    margin: int | None = None
    """How many powers of two scaling leaves free. None: 0."""
    interval: int | None = None
    """After how many steps the factors are computed anew, where the installed version can choose. None: 1."""
    fp8_format: str | None = None
    """`"HYBRID"` (E4M3 forward, E5M2 backward), `"E4M3"` or `"E5M2"`. None: `"HYBRID"`."""
    amax_history_len: int | None = None
    """Of how many steps the largest values are kept. None: 1024."""
    amax_compute_algo: str | None = None
    """`"max"` of them, or the `"most_recent"`, makes the factor. None: `"most_recent"`."""
    override_linear_precision: tuple[bool, bool, bool] | None = None
    """Whether outputs, gradients of inputs, and gradients of weights are computed in high precision. None: none."""
    use_mxfp8_block_scaling: bool | None = None
    """One factor per block of 32 numbers, on devices that have it. None: no."""
    skip: Sequence[str] = ()
    """Regular expressions that match the whole names of layers that stay as they are."""

    def __post_init__(self) -> None:
        _fill(self, "use_autocast_during_eval", read_flag("FP8_USE_AUTOCAST_DURING_EVAL"), False)
        _fill(self, "margin", read_int("FP8_MARGIN"), 0)
        _fill(self, "interval", read_int("FP8_INTERVAL"), 1)
        _fill(self, "fp8_format", read_text("FP8_FORMAT"), "HYBRID")
        _fill(self, "amax_history_len", read_int("FP8_AMAX_HISTORY_LEN"), 1024)
        _fill(self, "amax_compute_algo", read_text("FP8_AMAX_COMPUTE_ALGO"), "most_recent")
        _fill(self, "use_mxfp8_block_scaling", read_flag("FP8_USE_MXFP8_BLOCK_SCALING"), False)
        overrides = tuple(bool(read_flag(f"FP8_OVERRIDE_{name}")) for name in ("FPROP", "DGRAD", "WGRAD"))
        _fill(self, "override_linear_precision", overrides, None)
        object.__setattr__(self, "fp8_format", str(self.fp8_format).upper())
        object.__setattr__(self, "amax_compute_algo", str(self.amax_compute_algo).lower())
        self._check()

    def _check(self) -> None:
        check_boolean("TERecipeKwargs(use_autocast_during_eval)", self.use_autocast_during_eval)
        check_boolean("TERecipeKwargs(use_mxfp8_block_scaling)", self.use_mxfp8_block_scaling)
        check_integer("TERecipeKwargs(margin)", self.margin, 0)
        check_integer("TERecipeKwargs(interval)", self.interval, 1)
        check_integer("TERecipeKwargs(amax_history_len)", self.amax_history_len, 1)
        for name, known in (("fp8_format", FORMATS), ("amax_compute_algo", AMAX_ALGORITHMS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"TERecipeKwargs({name}={getattr(self, name)!r}) is unknown. {suggest(getattr(self, name), known)}"
                )
        given = self.override_linear_precision
        if not isinstance(given, Sequence) or len(given) != 3 or not all(isinstance(each, bool) for each in given):
            raise ConfigError(
                f"TERecipeKwargs(override_linear_precision={given!r}). Expected three booleans: for outputs, gradients "
                "of inputs, and gradients of weights."
            )
        object.__setattr__(self, "override_linear_precision", tuple(given))
        _check_choice("TERecipeKwargs", None, self.skip)


@dataclass(frozen=True, slots=True)
class MSAMPRecipeKwargs(KwargsHandler, RecipeKwargs):
    """FP8 by Microsoft's MS-AMP.

    Raises:
        ConfigError: the level is unknown.
    """

    backend: ClassVar[str] = "msamp"

    opt_level: str | None = None
    """`"O1"`: weights and their gradients are in FP8; `"O2"`: the optimizer's states too. None: read from its
    variable, else `"O2"`.
    """

    def __post_init__(self) -> None:
        _fill(self, "opt_level", read_text("FP8_OPT_LEVEL"), "O2")
        if self.opt_level not in OPT_LEVELS:
            raise ConfigError(
                f"MSAMPRecipeKwargs(opt_level={self.opt_level!r}) is unknown. {suggest(self.opt_level, OPT_LEVELS)}"
            )


FP8Recipe: TypeAlias = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs

RECIPES: Mapping[str, type[FP8Recipe]] = dict(
    zip(BACKENDS, (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs), strict=True)
)
"""The recipe of each backend, by Accelerate's word for it."""
_ALIASES = {"torchao": "ao", "transformer_engine": "te", "transformer-engine": "te", "ms-amp": "msamp"}
_MODULES = {"ao": "torchao", "te": "transformer_engine", "msamp": "msamp"}


def read_recipe(options: Mapping[str, Any], place: str) -> FP8Recipe:
    """The recipe of `{"backend": ..., **fields}`.

    Args:
        options: without a backend it is the one that has the first field, else `default_backend()`.
        place: where they were given, for errors.
    Raises:
        ConfigError: the backend or a field is unknown, or a value can't be used.
    """
    fields = dict(options)
    given = fields.pop("backend", None)
    word = _backend_with(fields) if given is None else _backend_word(given, place)
    kind = RECIPES[word]
    known = kind.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(f"{place}: backend {word!r} does not take {name!r}. {suggest(name, known)}")
    return kind(**fields)


def find_recipe(handlers: Handlers) -> FP8Recipe | None:
    """The recipe among an Accelerator's handlers, None where there is none.

    Raises:
        ConfigError: there are several.
    """
    found = [recipe for kind in RECIPES.values() if (recipe := handlers.find(kind)) is not None]
    if len(found) > 1:
        names = " and ".join(type(recipe).__name__ for recipe in found)
        raise ConfigError(f"kwargs_handlers holds {names}. Give the recipe of one backend.")
    return found[0] if found else None


def default_recipe() -> FP8Recipe:
    """The recipe of the backend that the variable names, else of the first that is installed: torchao, Transformer
    Engine, MS-AMP.

    Raises:
        ConfigError: the variable names none.
        MissingDependencyError: none is installed.
    """
    found = read_variable("FP8_BACKEND")
    if found is not None and found[1].lower() != "no":
        return RECIPES[_backend_word(found[1], found[0])]()
    for word, module in _MODULES.items():
        if is_installed(module):
            return RECIPES[word]()
    raise MissingDependencyError(
        "fp8 needs torchao, Transformer Engine or MS-AMP, and none of them is installed. Install the first, which runs "
        "on every device: pip install 'loopwright[fp8]'"
    )


def _backend_with(fields: Mapping[str, Any]) -> str:
    for word, kind in RECIPES.items():
        if fields and all(name in kind.__dataclass_fields__ for name in fields):
            return word
    return default_recipe().backend


def _backend_word(given: object, place: str) -> str:
    word = str(given).lower()
    word = _ALIASES.get(word, word)
    if word not in RECIPES:
        raise ConfigError(f"{place}: backend={given!r} is unknown. {suggest(word, RECIPES)}")
    return word


def _fill(recipe: KwargsHandler, name: str, found: Any, default: Any) -> None:
    """Give a field that is None what was found, else its default."""
    if getattr(recipe, name) is None:
        object.__setattr__(recipe, name, default if found is None else found)


def _check_choice(owner: str, function: object, skip: object) -> None:
    if function is not None and not callable(function):
        raise ConfigError(
            f"{owner}(module_filter_func={function!r:.80}). Expected a function of a module and its name."
        )
    if isinstance(skip, str) or not isinstance(skip, Sequence):
        raise ConfigError(f"{owner}(skip={skip!r:.80}). Expected a list of regular expressions.")
    for pattern in skip:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{owner}(skip) holds {pattern!r}, which is no regular expression: {error}.") from error
