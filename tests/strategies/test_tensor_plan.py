"""How layers are cut: plans that are given, and those that models have. In one process; nothing is cut here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.tensor_parallel import check_divides, find_plan, own_plan


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Base(nn.Module):
    """As the inner model of one of Hugging Face."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.words = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Pair() for _ in range(2))


class Outer(nn.Module):
    """As one with a head on it."""

    base_model_prefix = "model"
    _tp_plan: ClassVar = {"head": "colwise_rep", "absent.*": "rowwise"}

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.model = Base(plan)
        self.config = self.model.config
        self.head = nn.Linear(4, 10)


PLAN = {"words": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.norm": "sequence"}


def _named(model: nn.Module, plan: dict[nn.Module, Any]) -> dict[str, Any]:
    return {name: plan[module] for name, module in model.named_modules() if module in plan}


def test_the_plans_of_a_model_and_of_the_one_inside() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Outer(PLAN)

    task = Task()
    assert own_plan(task) == {f"net.model.{name}": word for name, word in PLAN.items()} | {
        "net.head": "colwise_rep",
        "net.absent.*": "rowwise",
    }
    found = _named(task, find_plan(task, None))
    assert sorted(found) == [
        "net.head", "net.model.layers.0.down", "net.model.layers.0.up", "net.model.layers.1.down",
        "net.model.layers.1.up", "net.model.words",
    ]  # fmt: skip
    kinds = {name.rpartition(".")[2]: type(style) for name, style in found.items()}
    rowwise = dict.fromkeys(("words", "down"), RowwiseParallel)
    assert kinds == rowwise | dict.fromkeys(("head", "up"), ColwiseParallel)
    assert found["net.head"].output_layouts == (Replicate(),)
    assert found["net.model.layers.0.up"].output_layouts == (Shard(-1),)
    assert found["net.model.words"].input_layouts == (Replicate(),)
    assert found["net.model.layers.0.down"].input_layouts == (Shard(-1),)


def test_a_given_plan_stands_alone() -> None:
    model, style = Outer(PLAN), ColwiseParallel(output_layouts=Replicate())
    assert _named(model, find_plan(model, {"model.layers.1.up": style, "head": "replicate"})) == {
        "model.layers.1.up": style
    }
    with pytest.raises(ConfigError, match=r"Outer has no module 'layers.\*.up'. Did you mean 'model.layers.\*.up'"):
        find_plan(model, {"layers.*.up": "colwise"})
    with pytest.raises(ConfigError, match=r"Outer has no plan of its own \(tp_plan\), and none was given"):
        find_plan(model, {"head": "replicate"})


def test_an_unknown_word_of_a_model() -> None:
    with pytest.raises(ConfigError, match=r"tp_plan of Outer\['model.layers.\*.up'\]='local_packed' is unknown"):
        find_plan(Outer({"layers.*.up": "local_packed"}), None)


def test_inputs_that_are_not_cut_evenly() -> None:
    model = Outer(PLAN)
    check_divides(find_plan(model, None), 3)
    with pytest.raises(ConfigError, match="has 6 inputs, which can't be cut into 4 equal parts"):
        check_divides(find_plan(model, {"model.layers.*.down": "rowwise"}), 4)


@pytest.mark.parametrize("name", ["model.layers.0.up", "model.words"])
def test_weights_that_would_see_a_part_of_each_sequence(name: str) -> None:
    with pytest.raises(ConfigError, match="with weights of its own, which 'sequence_gather' would train on a part"):
        find_plan(Outer(PLAN), {name: "sequence_gather"})
