"""Which modules become units."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.registry import create_strategy
from loopwright.strategies.wrapping import find_units

from .sharded import Layer, Words


def names(model: nn.Module, policy: Any, ignored: Any = ()) -> list[str]:
    known = {module: name for name, module in model.named_modules()}
    return [known[unit] for unit in find_units(model, policy, ignored)]


class Choosy(Words):
    _no_split_modules = ("LayerNorm", "Missing")


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("auto", ["layers.1", "layers.0"]),
        ("none", []),
        ("Layer", ["layers.1", "layers.0"]),
        (Layer, ["layers.1", "layers.0"]),
        (["Layer", nn.LayerNorm], ["layers.1.norm", "layers.1", "layers.0.norm", "layers.0"]),
        # A layer holds 432 parameters; without its first matrix (216) it holds as many.
        (400, ["layers.1", "layers.0"]),
        (201, ["layers.1.inner", "layers.1", "layers.0.inner", "layers.0"]),
        (433, ["layers"]),
        (lambda module: isinstance(module, nn.LayerNorm), ["layers.1.norm", "layers.0.norm"]),
        # The embedding's weight is the head's, so that neither has it for itself.
        (["Embedding", "Layer"], ["layers.1", "layers.0"]),
    ],
)
def test_units(policy: Any, wanted: list[str]) -> None:
    assert names(Words(2), policy) == wanted


def test_the_models_own_classes_come_first() -> None:
    assert names(Choosy(2), "auto") == ["layers.1.norm", "layers.0.norm"]


def test_ignored_modules_hold_no_unit() -> None:
    model = Words(2)
    assert names(model, ["Layer", "LayerNorm"], [model.layers[1]]) == ["layers.0.norm", "layers.0"]


def test_classes_that_a_model_lacks() -> None:
    with pytest.raises(
        ConfigError, match=r"Words has no module of class 'Leyer'\. Did you mean 'Layer'\? Accepted: .*"
    ):
        find_units(Words(2), ["Leyer"])
    held = nn.ModuleList([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match=r"modules of class 'ModuleList' are never called themselves"):
        find_units(nn.Sequential(held), "ModuleList")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": 0}, r"FSDPStrategy\(wrap\)=0\. Expected 'auto', 'none', classes"),
        ({"wrap": True}, r"FSDPStrategy\(wrap\)=True\. Expected 'auto'"),
        ({"cpu_offload": "no"}, r"FSDPStrategy\(cpu_offload='no'\)"),
        ({"mesh": [2]}, r"FSDPStrategy\(mesh=\[2\]\)\. Expected two sizes"),
        ({"param_dtype": "bf61"}, r"FSDPStrategy\(param_dtype='bf61'\) is unknown\. Did you mean 'bf16'"),
        ({"prefetch": -1}, r"FSDPStrategy\(prefetch=-1\)"),
        ({"ignored_modules": "head"}, r"FSDPStrategy\(ignored_modules='head'\)\. Expected a list"),
        ({"warp": "auto"}, r"strategy='fsdp' does not take these .* Did you mean 'wrap'\? Accepted: activation_che"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_strategy({"name": "fsdp"} | options)


def test_the_word() -> None:
    assert type(create_strategy("fsdp")) is FSDPStrategy
