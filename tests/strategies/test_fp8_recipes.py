"""Recipes of FP8: fields, variables, words. Nothing of it imports a library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fp8_recipes import (
    AORecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    default_recipe,
    find_recipe,
    read_recipe,
)
from loopwright.strategies.handlers import Handlers


def test_defaults_are_those_of_accelerate() -> None:
    assert TERecipeKwargs().to_dict() == {
        "use_autocast_during_eval": False, "margin": 0, "interval": 1, "fp8_format": "HYBRID", "amax_history_len": 1024,
        "amax_compute_algo": "most_recent", "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False, "skip": (),
    }  # fmt: skip
    assert MSAMPRecipeKwargs().opt_level == "O2"
    assert AORecipeKwargs().pad_inner_dim is True
    assert TERecipeKwargs(margin=3).to_kwargs() == {"margin": 3}


@pytest.mark.parametrize(
    ("recipe", "variable", "text", "field", "value"),
    [
        (AORecipeKwargs, "PAD_INNER_DIM", "no", "pad_inner_dim", False),
        (AORecipeKwargs, "ENABLE_FSDP_FLOAT8_ALL_GATHER", "true", "enable_fsdp_float8_all_gather", True),
        (TERecipeKwargs, "USE_AUTOCAST_DURING_EVAL", "1", "use_autocast_during_eval", True),
        (TERecipeKwargs, "MARGIN", "2", "margin", 2),
        (TERecipeKwargs, "INTERVAL", "3", "interval", 3),
        (TERecipeKwargs, "FORMAT", "e5m2", "fp8_format", "E5M2"),
        (TERecipeKwargs, "AMAX_HISTORY_LEN", "16", "amax_history_len", 16),
        (TERecipeKwargs, "AMAX_COMPUTE_ALGO", "MAX", "amax_compute_algo", "max"),
        (TERecipeKwargs, "OVERRIDE_DGRAD", "True", "override_linear_precision", (False, True, False)),
        (TERecipeKwargs, "USE_MXFP8_BLOCK_SCALING", "yes", "use_mxfp8_block_scaling", True),
        (MSAMPRecipeKwargs, "OPT_LEVEL", "O1", "opt_level", "O1"),
    ],
)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, variable: str, text: str, field: str, value: Any
) -> None:
    monkeypatch.setenv(f"ACCELERATE_FP8_{variable}", text)
    assert getattr(recipe(), field) == value


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        (AORecipeKwargs, {"recipe": "tensor"}, r"recipe='tensor'\) is unknown\. Did you mean 'tensorwise'\? Acc"),
        (AORecipeKwargs, {"recipe": "rowwise", "config": 1}, "and config were both given"),
        (AORecipeKwargs, {"emulate": 1}, r"AORecipeKwargs\(emulate=1\)\. Expected True or False"),
        (AORecipeKwargs, {"skip": "head"}, r"skip='head'\)\. Expected a list of regular expressions"),
        (AORecipeKwargs, {"skip": ["("]}, "which is no regular expression: missing"),
        (AORecipeKwargs, {"module_filter_func": "head"}, "Expected a function of a module and its name"),
        (
            AORecipeKwargs, {"recipe": "mxfp8", "enable_fsdp_float8_all_gather": True},
            r"weights are gathered in FP8 with one factor per tensor alone\. Use recipe='tensorwise'",
        ),
        (TERecipeKwargs, {"fp8_format": "E3M4"}, r"fp8_format='E3M4'\) is unknown\. .*Accepted: E4M3, E5M2, HYBRID"),
        (TERecipeKwargs, {"amax_compute_algo": "mean"}, r"amax_compute_algo='mean'\) is unknown\. .*: max, most_re"),
        (TERecipeKwargs, {"margin": -1}, r"TERecipeKwargs\(margin=-1\)\. Expected an integer >= 0"),
        (TERecipeKwargs, {"override_linear_precision": (1, 0, 0)}, "Expected three booleans"),
        (MSAMPRecipeKwargs, {"opt_level": "O3"}, r"opt_level='O3'\) is unknown\. .*Accepted: O1, O2"),
    ],
)  # fmt: skip
def test_what_a_field_can_not_be(recipe: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**fields)


def test_options_name_their_backend() -> None:
    assert read_recipe({"opt_level": "O1"}, "here") == MSAMPRecipeKwargs("O1")
    assert read_recipe({"margin": 1}, "here") == TERecipeKwargs(margin=1)
    assert read_recipe({"backend": "TE"}, "here") == TERecipeKwargs()
    assert read_recipe({"backend": "torchao", "recipe": "mxfp8"}, "here") == AORecipeKwargs(recipe="mxfp8")


def test_the_default_is_the_first_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    assert default_recipe() == AORecipeKwargs()
    monkeypatch.setenv("LOOPWRIGHT_FP8_BACKEND", "msamp")
    assert default_recipe() == MSAMPRecipeKwargs()
    monkeypatch.setenv("LOOPWRIGHT_FP8_BACKEND", "tea")
    with pytest.raises(ConfigError, match=r"LOOPWRIGHT_FP8_BACKEND: backend='tea' is unknown\. Did you mean 'te'"):
        default_recipe()


def test_one_recipe_among_the_handlers() -> None:
    assert find_recipe(Handlers([TERecipeKwargs()])) == TERecipeKwargs()
    assert find_recipe(Handlers()) is None
    with pytest.raises(ConfigError, match="holds AORecipeKwargs and TERecipeKwargs"):
        find_recipe(Handlers([TERecipeKwargs(), AORecipeKwargs()]))


def test_neither_recipes_nor_trainers_import_the_library() -> None:
    code = (
        "import sys, loopwright; from loopwright import AORecipeKwargs, TERecipeKwargs, Trainer; AORecipeKwargs();"
        "Trainer(max_steps=1, precision='fp8', trackers=False, progress=False);"
        "sys.exit(any(name in sys.modules for name in ('torchao', 'bitsandbytes')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0
