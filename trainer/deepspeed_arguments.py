"""What an `Accelerator`'s DeepSpeed plugin, its other arguments and the environment mean together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..distributed.environment import read_flag, read_variable
from ..distributed.errors import ConfigError
from ..strategies.deepspeed import DeepSpeedStrategy
from ..strategies.deepspeed_plugin import DeepSpeedPlugin
from ..strategies.gradient_state import GradientAccumulationPlugin
from ..strategies.precision import PrecisionLike
from ..strategies.registry import AUTO, DEEPSPEED


def find_deepspeed(spec: Any, plugin: Any, plugins: Any) -> DeepSpeedStrategy | None:
    """DeepSpeed with the options of the plugins that were given, or that the environment has; None where it is not
    DeepSpeed, or has no plugin.

    Args:
        spec: the Accelerator's strategy.
        plugin: one, or several by name.
        plugins: several by name, of which the first is used until another is selected.
    Raises:
        ConfigError: they are something else, or contradict each other or the strategy.
    """
    if plugin is not None and plugins is not None:
        raise ConfigError("deepspeed_plugin and deepspeed_plugins were both given. Give one of them.")
    given = plugin if plugins is None else plugins
    if given is not None:
        named = _named(given)
        if spec not in (AUTO, DEEPSPEED):
            raise ConfigError(
                f"strategy={spec!r:.80} and deepspeed_plugin=DeepSpeedPlugin(...) were both given. Leave strategy out, "
                "or give DeepSpeed's options there: strategy={'name': 'deepspeed', 'zero_stage': ...}."
            )
        return DeepSpeedStrategy.from_plugins(named)
    if not read_flag("USE_DEEPSPEED"):
        return None
    if spec in (AUTO, DEEPSPEED):
        return DeepSpeedStrategy.from_plugins({"default": DeepSpeedPlugin()})
    found = read_variable("USE_DEEPSPEED")
    if found is not None:
        warnings.warn(f"{found[0]}={found[1]} is not used: strategy={spec!r:.80} was given.", stacklevel=4)
    return None


def accumulation_of(
    strategy: DeepSpeedStrategy, given: GradientAccumulationPlugin, num_steps: int | None
) -> GradientAccumulationPlugin:
    """How gradients are accumulated: as often as DeepSpeed's configuration says, where it does.

    Args:
        strategy: with its plugin.
        given: what the Accelerator was given.
        num_steps: the number that it was given, None where it was none.
    """
    wanted = strategy.options.config.get("gradient_accumulation_steps", AUTO)
    if not isinstance(wanted, int) or wanted == given.num_steps:
        return given
    if num_steps is not None or given.num_steps != 1:
        warnings.warn(
            f"gradient_accumulation_steps={given.num_steps}, and DeepSpeed's configuration has {wanted}, which is "
            "used. Give the number in one place.",
            stacklevel=4,
        )
    return replace(given, num_steps=wanted)


def precision_of(strategy: DeepSpeedStrategy, given: PrecisionLike | None) -> PrecisionLike | None:
    """The precision that was given, else the one that DeepSpeed's configuration enables."""
    if given is not None or read_variable("MIXED_PRECISION") is not None:
        return given
    plugin: DeepSpeedPlugin = strategy.plugin
    return plugin.precision


def _named(given: Any) -> dict[str, DeepSpeedPlugin]:
    named = dict(given) if isinstance(given, Mapping) else {"default": given}
    wrong = [plugin for plugin in named.values() if not isinstance(plugin, DeepSpeedPlugin)]
    if wrong or not named:
        raise ConfigError(
            f"deepspeed_plugin={given!r:.80}. Expected DeepSpeedPlugin(...), or a mapping of names to such."
        )
    return named
