"""Recompilations are counted exactly, by module and with their cause; a steady training has none."""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright import Accelerator, ProgressBar, Task, TorchDynamoPlugin
from loopwright.strategies.recompiling import WARN_AFTER

from .sharded import fit
from .test_compiling import compiler

WHOLE = {"backend": "eager", "dynamic": False}
REGIONAL = {**WHOLE, "regional": True}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers * self.weight


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))  # so that all layers get what has a gradient
        self.layers = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, numbers: Tensor) -> Tensor:
        numbers = numbers * self.first
        for layer in self.layers:
            numbers = layer(numbers)
        return numbers


class Scaling(Task):
    """Its batches may have any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Scales()
        self.other = Scale()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.other(self.net(batch)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.ones(2, size) for size in sizes]


def names(task: Task) -> list[str]:
    return list(task.state_dict())


@pytest.mark.parametrize(("sizes", "count"), [([4, 4, 4, 4], 0), ([4, 5, 4, 5], 1), ([4, 5, 6, 5, 7, 7], 3)])
@pytest.mark.parametrize(
    ("options", "modules"),
    [(WHOLE, ["net (Scales)", "other (Scale)"]), (REGIONAL, ["net.layers.0 and 2 more (Scale)"])],
    ids=["whole", "regional"],
)
def test_each_new_shape_counts_once(
    options: dict[str, Any], modules: Sequence[str], sizes: Sequence[int], count: int
) -> None:
    task = Scaling()
    before = names(task)
    with compiler():
        trainer = fit(task, batches(sizes), compile=options)
        assert trainer.recompilations == (dict.fromkeys(modules, count) if count else {})
        again = fit(task, batches(sizes), compile=options)  # all its versions are there
        assert again.recompilations == {}
    assert names(task) == before


def test_one_warning_names_module_number_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    sizes = range(4, 5 + WARN_AFTER)
    with compiler():
        trainer = fit(Scaling(), batches([*sizes, sizes[-1] + 1]), compile=REGIONAL)
        assert trainer.recompilations == {"net.layers.0 and 2 more (Scale)": WARN_AFTER + 1}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "loopwright"]
    assert said.startswith(f"net.layers.0 and 2 more (Scale) was compiled anew {WARN_AFTER} times, the last time")
    assert re.search(rf"tensor 'numbers' size mismatch at index 1\. expected {sizes[-2]}, actual {sizes[-1]}", said)
    assert "compile with dynamic=True" in said


def test_shapes_that_are_variables_need_one_version() -> None:
    with compiler():
        trainer = fit(Scaling(), batches([4, 5, 6, 7, 8, 9]), compile={"backend": "eager", "dynamic": True})
        assert trainer.recompilations == {}


def test_a_validation_is_another_version() -> None:
    with compiler():
        trainer = fit(Scaling(), batches([4, 4]), batches([4, 4]), compile=REGIONAL)
        assert trainer.recompilations == {"net.layers.0 and 2 more (Scale)": 1}


def test_nothing_is_counted_where_nothing_is_compiled() -> None:
    assert fit(Scaling(), batches([4, 5])).recompilations == {}


def test_they_are_shown_at_the_end() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)
    with compiler():
        fit(Scaling(), batches([4, 5]), compile=REGIONAL, callbacks=[bar])
    assert "compiled anew: net.layers.0 and 2 more (Scale) 1 times" in stream.getvalue()


class TestAccelerator:
    def test_counts_what_prepare_compiled(self) -> None:
        from torch._dynamo.callback import callback_handler

        model = Scales()
        plugin = TorchDynamoPlugin(backend="eager", dynamic=False, use_regional_compilation=True)
        with compiler():
            accelerator = Accelerator(dynamo_plugin=plugin)
            assert accelerator.recompilations == {}
            prepared = accelerator.prepare(model)
            for batch in batches([4, 5, 6]):
                prepared(batch)
            assert accelerator.recompilations == {"layers.0 and 2 more (Scale)": 2}
            accelerator.free_memory()
            assert callback_handler.end_callbacks == []

    def test_leaves_nothing_with_torch(self) -> None:
        from torch._dynamo.callback import callback_handler

        with compiler():
            Accelerator(dynamo_backend="eager").prepare(Scales())
            gc.collect()
            assert callback_handler.end_callbacks == []


def test_a_compiler_that_was_reset_is_no_error() -> None:
    with compiler():
        task = Scaling()
        trainer = fit(task, batches([4, 5]), compile=REGIONAL)
        torch._dynamo.reset()
        assert fit(task, batches([4]), compile=REGIONAL).recompilations == {}
        assert trainer.recompilations == {"net.layers.0 and 2 more (Scale)": 1}
