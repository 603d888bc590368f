"""Gradients that processes along the tensor axis have to have alike: what is found where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.parallelism import ParallelismConfig
from loopwright.trainer.accelerator import Accelerator

from .sharded import Words, close, fit, loader, state_of
from .test_tensor_parallel import SEQUENCES, TENSOR, Even

Run = Callable[..., list[Any]]


def _refused(task: Words, plan: dict[str, str], **options: Any) -> str:
    with pytest.raises(ConfigError, match="processes along the tensor axis have different gradients") as caught:
        fit(task, loader(48, 8), strategy=TENSOR | {"wrap": "none", "tensor_plan": plan}, **options)
    return str(caught.value)


class Silent(Even):
    """Begins with layers that give 0, so that no gradient comes behind them in the first step."""

    def __init__(self) -> None:
        super().__init__(2, "sgd")
        for layer in self.layers:
            nn.init.zeros_(layer.outer.weight)


class Thaws(Callback):
    """Trains the norms from the second epoch on."""

    def on_epoch_start(self, trainer: Any, task: Any) -> None:
        for layer in task.layers:
            layer.norm.requires_grad_(trainer.state.epoch > 0)


def _without_norms() -> list[str]:
    plan = {name: word for name, word in SEQUENCES.items() if name != "layers.*.norm"}
    cases: list[dict[str, Any]] = [
        {}, {"accumulate": 3}, {"precision": "bf16"}, {"precision": "fp16"}, {"clip_value": 0.01},
        {"callbacks": [Thaws()], "max_epochs": 2},
    ]  # fmt: skip
    torch.manual_seed(1)
    return [_refused(Even(2, "sgd"), plan, **case) for case in cases] + [_refused(Silent(), plan)]


def test_norms_between_parts_of_sequences(two_processes: Run) -> None:
    first, second = two_processes(_without_norms)
    assert first == second
    for text in first:
        assert "of what each has whole: layers.0.norm.weight, layers.0.norm.bias, layers.1.norm.weight, " in text
        assert text.endswith("put them into tensor_plan as 'sequence', or what stands before them as 'sequence_gather' "
                             "or 'gather'.")  # fmt: skip


class Heads(Words):
    """With a norm on heads that are cut."""

    def __init__(self, num_layers: int = 2, kind: str = "sgd") -> None:
        super().__init__(num_layers, kind)
        self.head_norm = nn.RMSNorm(4)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(words))
        heads = self.head_norm(self.up(hidden).unflatten(-1, (-1, 4))).flatten(-2)
        logits: Tensor = self.head(hidden + self.down(torch.tanh(heads))) * self.scale
        return logits


def _heads(plan: dict[str, str] | None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    options: dict[str, Any] = {} if plan is None else {"strategy": TENSOR | {"tensor_plan": plan}}
    return state_of(fit(Heads(), loader(48, 8), clip_norm=0.5, **options))


def _heads_cut() -> Any:
    plan = {"up": "colwise", "down": "rowwise"}
    torch.manual_seed(1)
    text = _refused(Heads(), plan)
    return (
        text,
        _heads(plan | {"head_norm": "sequence"}),
        _heads(plan | {"head_norm": "replicated_with_grad_allreduce"}),
    )


def test_norms_of_heads(two_processes: Run) -> None:
    wanted = _heads(None)
    text, *found = two_processes(_heads_cut)[0]
    assert "of what each has whole: head_norm.weight. Their modules" in text
    for each in found:
        close(each, wanted)


class Dropping(Words):
    """With dropout on whole activations; the first layer is frozen, and nothing uses one parameter."""

    def __init__(self) -> None:
        super().__init__(2, "sgd")
        self.unused = nn.Parameter(torch.zeros(3))
        self.layers[0].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(F.dropout(self.layers(self.embedding(words)))) * self.scale
        return logits


def _own_loop(seeds: tuple[int, int]) -> str:
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=2), strategy={"name": "fsdp", "tensor_plan": TENSOR["tensor_plan"]}
    )
    model: Any = Dropping()
    model, optimizer, data = accelerator.prepare(model, model.configure_optimizers(), loader(24, 8))
    torch.manual_seed(seeds[accelerator.process_index])
    try:
        for (words,) in data:
            loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""


def test_dropout_of_other_random_numbers(two_processes: Run) -> None:
    assert two_processes(_own_loop, (3, 3)) == ["", ""]
    first, second = two_processes(_own_loop, (3, 4))
    assert first == second
    assert "Random numbers differ along it too, so that dropout does: seed its processes alike" in first
