"""`TorchDynamoPlugin`: Accelerate's names, variables and what `torch.compile` is told."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from loopwright import Accelerator, TorchDynamoPlugin
from loopwright.distributed.environment import PREFIXES, VARIABLES
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.compiling import Compiling, read_compiling
from loopwright.trainer.accelerator_state import AcceleratorState

NEEDS_ACCELERATE = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
GIVEN: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"backend": "INDUCTOR", "fullgraph": True, "use_regional_compilation": True}, {}),
    ({"backend": "eager", "options": {"trace.enabled": True}, "dynamic": False, "disable": True}, {}),
    ({}, {"BACKEND": "AOT_EAGER", "MODE": "reduce-overhead", "USE_FULLGRAPH": "True", "USE_DYNAMIC": "False"}),
    ({"mode": "max-autotune", "fullgraph": False}, {"MODE": "default", "USE_FULLGRAPH": "1", "BACKEND": "no"}),
    ({"backend": "no"}, {"BACKEND": "INDUCTOR", "USE_REGIONAL_COMPILATION": "yes", "USE_DYNAMIC": "true"}),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        for prefix in PREFIXES if name.startswith("DYNAMO_") else ():
            monkeypatch.delenv(prefix + name, raising=False)


@NEEDS_ACCELERATE
@pytest.mark.parametrize(("fields", "variables"), GIVEN)
def test_fields_and_variables_mean_what_they_mean_to_accelerate(
    fields: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", text)
    theirs = importlib.import_module("accelerate.utils").TorchDynamoPlugin(**fields)
    ours = TorchDynamoPlugin(**fields)
    assert ours.to_dict() == theirs.to_dict()
    assert ours.to_kwargs() == theirs.to_kwargs()


@NEEDS_ACCELERATE
def test_the_backends_are_accelerates() -> None:
    utils = importlib.import_module("accelerate.utils")
    for member in utils.DynamoBackend:
        assert TorchDynamoPlugin(backend=member).backend == member.value.lower()


def test_our_own_variables_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("LOOPWRIGHT_DYNAMO_BACKEND", "eager")
    assert TorchDynamoPlugin().backend == "eager"
    assert Accelerator().state.dynamo_plugin == TorchDynamoPlugin(backend="eager")
    assert AcceleratorState().dynamo_plugin.backend == "eager"
    assert Accelerator(dynamo_backend="no").state.dynamo_plugin.backend == "no"


def test_what_is_compiled() -> None:
    assert read_compiling(TorchDynamoPlugin()) is None
    assert read_compiling(TorchDynamoPlugin(backend="inductor", disable=True)) is None
    plugin = TorchDynamoPlugin(backend="inductor", mode="max-autotune", dynamic=False, use_regional_compilation=True)
    options = {"backend": "inductor", "mode": "max-autotune", "dynamic": False}
    assert read_compiling(plugin) == Compiling(regional=True, options=options)
    assert read_compiling(TorchDynamoPlugin(backend=print)) == Compiling(options={"backend": print})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "inducter"}, r"backend='inducter'\) is unknown\. Did you mean 'inductor'\?.*given as a function"),
        ({"mode": "max"}, r"mode='max'\) is unknown\. Accepted: default, max-autotune"),
        ({"fullgraph": 1}, r"fullgraph=1\)\. Expected True, False or None"),
        ({"dynamic": "auto"}, r"dynamic='auto'\)\. Expected True, False or None"),
        ({"disable": None}, r"disable=None\)?\. Expected True or False|disable\)=None\. Expected True or False"),
        ({"options": ["a"]}, r"options=\['a'\]\)\. Expected a mapping, or None"),
        ({"options": {"a": 1}, "mode": "max-autotune"}, r"a mode is a choice of options\. Give one of them"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchDynamoPlugin(**fields)


def test_bad_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inducter")
    with pytest.raises(ConfigError, match=r"ACCELERATE_DYNAMO_BACKEND='inducter' is unknown\. Did you mean 'inductor'"):
        Accelerator()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("LOOPWRIGHT_DYNAMO_USE_DYNAMIC", "auto")
    with pytest.raises(ConfigError, match=r"LOOPWRIGHT_DYNAMO_USE_DYNAMIC='auto' is neither true nor false"):
        TorchDynamoPlugin()


def test_backend_and_plugin_are_given_in_one_place() -> None:
    plugin = TorchDynamoPlugin(backend="eager")
    with pytest.raises(ConfigError, match=r"dynamo_backend='eager' and dynamo_plugin=.* Give the plugin alone"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=plugin)
    with pytest.raises(ConfigError, match=r"dynamo_plugin='eager'\. Expected TorchDynamoPlugin\("):
        Accelerator(dynamo_plugin="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kwargs_handlers holds TorchDynamoPlugin\(.*is no handler object"):
        Accelerator(kwargs_handlers=[plugin])  # type: ignore[list-item]
