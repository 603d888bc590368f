"""Where an `Accelerator` is told to compute in FP8, and the strategy with it around another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..distributed.errors import ConfigError
from ..strategies.deepspeed import DeepSpeedStrategy
from ..strategies.fp8_recipes import FP8Recipe, find_recipe
from ..strategies.handlers import Handlers
from ..strategies.precision import FP8Precision, Precision, TruePrecision
from ..strategies.registry import FP8, create_strategy
from ..strategies.strategy import Strategy


def join_fp8(
    strategy: Strategy, options: Mapping[str, Any] | None, precision: Precision, handlers: Handlers
) -> Strategy:
    """The strategy with FP8 around it, where the strategy's word or the precision asks for it.

    Args:
        strategy: as it is without.
        options: of FP8 in the strategy's mapping; None: its word does not ask for it.
        precision: of the run.
        handlers: of the run; a recipe among them is taken where none was given elsewhere.
    Raises:
        ConfigError: a recipe is given that nothing asks for, or twice; or the two can't work together.
    """
    if isinstance(precision, TruePrecision) and isinstance(strategy, DeepSpeedStrategy):
        raise ConfigError(
            f"precision={precision.name!r} with DeepSpeed. Use {precision.name.removesuffix('-true')!r}: from stage 1 "
            "on it keeps weights in 16 bits, and a copy in fp32 that is updated."
        )
    recipe = find_recipe(handlers)
    if strategy.converts_layers:
        _refuse(recipe, f"{type(strategy).__name__} was made before. Give it there: FP8Strategy(recipe_kwargs=...)")
        return strategy
    if options is None and not isinstance(precision, FP8Precision):
        _refuse(recipe, f"the precision is {precision.name!r}. Use mixed_precision='fp8', or leave it out")
        return strategy
    _check_once(options, precision, recipe)
    own = dict(options or {}) if recipe is None else {"recipe_kwargs": recipe}
    return create_strategy({"name": FP8, "strategy": strategy, **own})


def _refuse(recipe: FP8Recipe | None, why: str) -> None:
    if recipe is not None:
        raise ConfigError(f"kwargs_handlers holds {type(recipe).__name__}, and {why}.")


def _check_once(options: Mapping[str, Any] | None, precision: Precision, recipe: FP8Recipe | None) -> None:
    places = {
        "strategy='fp8'": bool(options),
        "precision='fp8'": isinstance(precision, FP8Precision) and precision.recipe is not None,
        "kwargs_handlers": recipe is not None,
    }
    given = [place for place, is_given in places.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"recipes of fp8 were given in {' and '.join(given)}. Give one of them.")
