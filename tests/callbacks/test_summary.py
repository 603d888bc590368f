"""`ModelSummary` and `summarize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.summary import ModelSummary, summarize
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.BatchNorm1d(10))  # 650, 0, 20 and 21 in buffers
        self.head = nn.Linear(10, 100, bias=False)  # 1000


def cells(line: str) -> list[str]:
    return line.split()


def test_children_with_counts_modes_and_sizes() -> None:
    net = Net()
    net.head.requires_grad_(False)
    net.body[2].eval()
    lines = summarize(net).splitlines()
    assert lines[0] == "Net"
    assert cells(lines[1]) == ["name", "type", "parameters", "trainable", "mode"]
    assert cells(lines[2]) == ["body", "Sequential", "670", "670", "train"]
    assert cells(lines[3]) == ["head", "Linear", "1,000", "0", "train"]
    assert lines[4] == "parameters: 1,670 (670 trainable, 1,000 frozen)"
    # 1670 * 4 bytes; the buffers are 2 * 10 floats and one 64-bit count.
    assert lines[5] == "size: 0.01 MB (float32 0.01); buffers 0.00 MB (float32 0.00, int64 0.00)"
    assert lines[6] == "modules: 5 in train mode, 1 in eval mode"
    assert len(lines) == 7


@pytest.mark.parametrize(("depth", "names"), [(0, []), (1, ["body", "head"]), (-1, ["body", "0", "1", "2", "head"])])
def test_depth(depth: int, names: list[str]) -> None:
    lines = summarize(Net(), depth).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("parameters: "))
    assert [cells(line)[0] for line in lines[2:end]] == names


def test_columns_line_up() -> None:
    lines = summarize(Net(), -1).splitlines()[1:7]
    assert len({line.index(mode) for line, mode in zip(lines, ["mode", *["train"] * 5], strict=True)}) == 1


def test_shared_parameters_count_once() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(50, 8), "out": nn.Linear(8, 50, bias=False)})
    net["out"].weight = net["embed"].weight
    text = summarize(net)
    assert "embed  Embedding         400" in text
    assert "out    Linear            400" in text
    assert "parameters: 400 (400 trainable, 0 frozen)" in text


def test_own_parameters_have_a_row() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    assert cells(summarize(Scaled()).splitlines()[2]) == ["(own)", "3", "3"]


def test_sizes_by_number_format() -> None:
    net = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 500, bias=False).bfloat16())
    assert "size: 5.00 MB (float32 4.00, bfloat16 1.00)" in summarize(net)


def test_lazy_parameters_are_unknown() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    lines = summarize(net).splitlines()
    assert cells(lines[2]) == ["0", "LazyLinear", "?", "?", "train"]
    assert "parameters: 10 + ? (10 + ? trainable, 0 frozen)" in lines
    assert lines[-1] == "lazy: 2 parameters get their shape from the first batch, and are not counted"


def test_meta_parameters_are_counted() -> None:
    with torch.device("meta"):
        net = nn.Linear(100_000, 100_000, bias=False)
    text = summarize(net)
    assert "parameters: 10,000,000,000" in text
    assert "size: 40,000.00 MB (float32 40,000.00)" in text
    assert text.endswith("meta: 1 parameters have no storage yet")


def test_no_parameters() -> None:
    assert "parameters: 0 (0 trainable, 0 frozen)\nsize: 0.00 MB\n" in summarize(nn.ReLU())


@pytest.mark.parametrize("make", [ModelSummary, lambda depth: summarize(nn.ReLU(), depth)])
@pytest.mark.parametrize("depth", [-2, None, 1.0])
def test_depths_that_are_none(make: Any, depth: Any) -> None:
    with pytest.raises(ConfigError, match=rf"max_depth={depth}\)?\. Expected an integer >= -1\. -1 shows everything"):
        make(depth)


class Tiny(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_is_printed_once_when_training_starts(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=2, callbacks=[ModelSummary()], trackers=False, progress=False)
    trainer.fit(Tiny(), [torch.ones(2, 2)])
    text = capsys.readouterr().err
    assert text.startswith(
        "Tiny\nname  type    parameters  trainable  mode\nnet   Linear           3          3  train\n"
    )
    assert text.count("parameters: 3 (3 trainable, 0 frozen)") == 1
