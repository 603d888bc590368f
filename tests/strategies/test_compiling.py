"""What is compiled: once for all layers of a model, under each strategy, with the numbers of eager mode."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.compiling import CompiledForward, Compiling, compile_parts, read_compiling

from .sharded import fit, loader, make, state_of, words

Run = Callable[..., list[Any]]

REGIONAL = {"regional": True, "backend": "aot_eager"}


@contextmanager
def compiler() -> Iterator[dict[str, int]]:
    """A context with a new compiler; gives what it counts."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    environment = dict(os.environ)
    dynamo.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The .grad attribute of a Tensor|.*script_method"
            )  # in torch's own compiler
            yield counters["stats"]
    finally:
        dynamo.reset()
        os.environ.clear()
        os.environ.update(environment)


def test_layers_are_compiled_once() -> None:
    model, plain = make(1, num_layers=12), make(1, num_layers=12)
    found = words(4).tensors[0]
    names = list(model.state_dict())
    with compiler() as counts:
        compile_parts(model, Compiling(regional=True, options={"backend": "aot_eager", "fullgraph": True}))
        outputs = model(found)
        outputs.sum().backward()
        assert counts["unique_graphs"] == 1
    assert list(model.state_dict()) == names
    torch.testing.assert_close(outputs, plain(found))


def test_a_copy_compiles_its_own_weights() -> None:
    model = make(1)
    with compiler():
        compile_parts(model, read_compiling(REGIONAL))
        found = words(4).tensors[0]
        before = model(found)
        other = copy.deepcopy(model)
        compile_parts(other, read_compiling(REGIONAL))
        assert isinstance(other.layers[0].forward, CompiledForward)
        assert not isinstance(other.layers[0].forward.__wrapped__, CompiledForward)
        nn.init.zeros_(other.layers[0].outer.weight)
        assert not torch.equal(other(found), before)
        assert torch.equal(model(found), before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("regionl", r"compile='regionl'\. Expected True, False, 'regional', or a mapping"),
        (1, r"compile=1\. Expected True"),
        ({"regional": "yes"}, r"compile\[regional\]='yes'"),
        ({"backnd": "x"}, r"compile has an unknown key 'backnd'\. Did you mean 'backend'"),
    ],
)
def test_what_cannot_be_read(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_compiling(given)


def test_a_model_without_repeated_layers() -> None:
    with pytest.raises(ConfigError, match=r"compile='regional': Linear has no list of several layers"):
        compile_parts(nn.Linear(1, 1), Compiling(regional=True))


def test_the_words_for_compiling() -> None:
    assert read_compiling(False) is None
    assert read_compiling(True) == Compiling()
    assert read_compiling("regional") == Compiling(regional=True)
    assert read_compiling(REGIONAL) == Compiling(regional=True, options={"backend": "aot_eager"})


def _train(batch_size: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], float, int]:
    with compiler() as counts:
        trainer = fit(make(1, kind="sgd"), loader(24, batch_size), loader(6, 3), accumulate=2, **options)
        return state_of(trainer), trainer.metrics["val/loss"], counts["unique_graphs"]


WAYS: list[dict[str, Any]] = [
    {"strategy": "ddp", "compile": REGIONAL},
    {"strategy": "fsdp", "compile": REGIONAL},
    {
        "strategy": {"name": "fsdp", "activation_checkpointing": True, "reshard_after_forward": False},
        "compile": REGIONAL,
    },
    {"strategy": "fsdp", "compile": {"backend": "aot_eager"}},
]


def _train_each(batch_size: int, ways: list[dict[str, Any]]) -> list[Any]:
    return [_train(batch_size, way) for way in ways]


def test_numbers_of_eager_mode(two_processes: Run) -> None:
    weights, metric, num_graphs = _train(8, {})
    assert num_graphs == 0
    alone = _train(8, {"compile": REGIONAL})
    found = [alone, *two_processes(_train_each, 4, WAYS)[0]]
    for own, value, graphs in found:
        torch.testing.assert_close(own, weights, atol=1e-5, rtol=0)
        assert value == pytest.approx(metric, abs=1e-5)
        assert graphs == 2  # one for training, one for validation, whatever the number of layers
