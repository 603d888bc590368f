"""What is compiled: once for all layers of a model, under each strategy, with the numbers of eager mode."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright import Accelerator, TorchDynamoPlugin
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.compiling import (
    CompiledForward,
    Compiling,
    compile_parts,
    compiled_codes,
    read_compiling,
)
from loopwright.strategies.forward import AutocastForward

from .sharded import fit, loader, make, state_of, words

Run = Callable[..., list[Any]]

REGIONAL = {"regional": True, "backend": "eager"}


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
        ({"backend": "inducter"}, r"compile\[backend\]='inducter' is unknown to torch\. Did you mean 'inductor'"),
        ({"backend": 3}, r"compile\[backend\]=3\. Expected the name of a backend, or a function"),
        ({"mode": "max-autotun"}, r"compile\[mode\]='max-autotun' is unknown to torch\. Did you mean 'max-autotune'"),
        ({"options": {"max_autotun": True}}, r"compile\[options\]='max_autotun' is unknown .*'max_autotune'"),
        ({"options": 3}, r"compile\[options\]=3\. Expected a mapping"),
        ({"mode": "default", "options": {}}, r"compile has mode='default' and options: .* Give one of them"),
        ({"dynamic": "maybe"}, r"compile\[dynamic\]='maybe'\. Expected True or False or None"),
        ({"fullgraph": 1}, r"compile\[fullgraph\]=1\. Expected True or False"),
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
    assert read_compiling(REGIONAL) == Compiling(regional=True, options={"backend": "eager"})


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
    {"strategy": "fsdp", "compile": {"backend": "eager"}},
]


def _train_each(batch_size: int, ways: list[dict[str, Any]]) -> list[Any]:
    return [_train(batch_size, way) for way in ways]


@pytest.mark.timeout(360)  # compiling takes long on busy machines
def test_numbers_of_eager_mode(two_processes: Run) -> None:
    weights, metric, num_graphs = _train(8, {})
    assert num_graphs == 0
    alone = _train(8, {"compile": REGIONAL})
    found = [alone, *two_processes(_train_each, 4, WAYS, timeout=300)[0]]
    for (own, value, graphs), parts in zip(found, [1, 1, 1, 1, 3], strict=True):
        torch.testing.assert_close(own, weights, atol=1e-5, rtol=0)
        assert value == pytest.approx(metric, abs=1e-5)
        assert graphs == 2 * parts  # for training and validation, whatever the number of layers


def test_modules_of_torch_are_compiled_whole_each_class_for_itself() -> None:
    class Nets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.lists = nn.ModuleList([nn.Linear(4, 2)])

    model = Nets()
    numbers = torch.randn(3, 4)
    wanted = model.lists[0](model.one(numbers))
    with compiler() as counts:
        compile_parts(model, Compiling(options={"backend": "eager", "fullgraph": True}))
        assert torch.equal(model.lists[0](model.one(numbers)), wanted)
        assert counts["unique_graphs"] == 2
        assert sorted(compiled_codes(model).values()) == ["lists.0 (Linear)", "one (Sequential)"]


def test_what_its_user_compiled_stays() -> None:
    task = make(1)
    task.layers.compile(backend="eager")
    task.head = torch.compile(task.head, backend="eager")  # type: ignore[assignment]
    compile_parts(task, Compiling())
    assert list(compiled_codes(task).values()) == ["embedding (Embedding)"]


class TestAccelerator:
    """Models are compiled in place, inside of the precision and of what a strategy puts around them."""

    @pytest.mark.parametrize("precision", ["no", "bf16"])
    @pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
    def test_numbers_and_names_of_eager_mode(self, precision: str, regional: bool) -> None:
        plain, model = make(1), make(1)
        found = words(4).tensors[0]
        plugin = TorchDynamoPlugin(backend="aot_eager", fullgraph=True, use_regional_compilation=regional)
        with compiler() as counts:
            accelerator = Accelerator(mixed_precision=precision, dynamo_plugin=plugin)
            prepared = accelerator.prepare(model)
            assert prepared is accelerator.prepare(model)
            wanted, outputs = Accelerator(mixed_precision=precision).prepare(plain)(found), prepared(found)
            outputs.sum().backward()
            assert counts["unique_graphs"] == 1
        torch.testing.assert_close(outputs, wanted)
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
        assert list(accelerator.get_state_dict(prepared)) == list(plain.state_dict())
        assert not isinstance(vars(model).get("forward"), AutocastForward) or precision == "bf16"
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert isinstance(vars(unwrapped).get("forward"), CompiledForward) != regional

    def test_a_model_without_repeated_layers_is_compiled_whole(self) -> None:
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        with compiler() as counts:
            model = Accelerator(dynamo_plugin=plugin).prepare(nn.Linear(2, 2))
            model(torch.ones(1, 2))
            assert counts["unique_graphs"] == 1

    def test_what_is_compiled_already_is_not_compiled_twice(self) -> None:
        model = torch.compile(nn.Linear(2, 2), backend="eager")
        assert Accelerator(dynamo_backend="eager").prepare(model) is model
        assert not any("forward" in vars(part) for part in model._orig_mod.modules())  # type: ignore[attr-defined]

    def test_nothing_is_compiled_unless_it_is_asked_for(self) -> None:
        for plugin in (TorchDynamoPlugin(), TorchDynamoPlugin(backend="eager", disable=True)):
            model = Accelerator(dynamo_plugin=plugin).prepare(nn.Linear(2, 2))
            assert "forward" not in vars(model)

    def test_copies_and_pickles_run_their_own_weights(self) -> None:
        with compiler():
            model = Accelerator(dynamo_backend="eager").prepare(nn.Linear(2, 2))
            ones = torch.ones(1, 2)
            before = model(ones)
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                nn.init.zeros_(other.weight)
                assert torch.equal(other(ones)[0], other.bias)
                assert torch.equal(model(ones), before)


def _accelerate(steps: int, backend: str) -> tuple[dict[str, Tensor], int, dict[str, int]]:
    with compiler() as counts:
        accelerator = Accelerator(dynamo_backend=backend)
        task = make(1, kind="sgd")
        names = list(task.state_dict())
        model, optimizer, data = accelerator.prepare(task, task.configure_optimizers(), loader(8 * steps, 4))
        for batch in data:
            accelerator.backward(model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        assert list(state) == names
        return (
            {name: value.clone() for name, value in state.items()},
            counts["unique_graphs"],
            accelerator.recompilations,
        )


def test_two_processes_under_ddp(two_processes: Run) -> None:
    wanted, found = (two_processes(_accelerate, 2, backend)[0] for backend in ("no", "eager"))
    torch.testing.assert_close(found[0], wanted[0])
    assert (wanted[1], found[1], found[2]) == (0, 1, {})
