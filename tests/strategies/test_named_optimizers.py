"""Optimizers by name, and states in 8 bits in checkpoints. bitsandbytes is imported here once; torchao's are slow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.named_optimizers import create_optimizer
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

WIDTH = 64  # 64 x 64 is the least that these packages keep in 8 bits


class Net(Task):
    def __init__(self, optimizer: Any = "adamw8bit", **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
        self.spec, self.options = optimizer, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return create_optimizer(self.spec, self.parameters(), **{"lr": 1e-2, **self.options})


def made(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(16, 8, generator=generator) for _ in range(5)]
    return [(x, x[:, :2].sin()) for x in inputs]


def fit(task: Task, resume_from: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(**({"max_epochs": 2, "progress": False, "trackers": False, "project_dir": "."} | options))
    trainer.fit(task, data(), resume_from=resume_from)
    return trainer


def loss(task: Net) -> float:
    with torch.no_grad():
        return sum(F.mse_loss(task.net(x), y).item() for x, y in data()) / 5


def test_names_of_torch() -> None:
    layer = nn.Linear(2, 2)
    assert type(create_optimizer("adamw", layer.parameters(), lr=0.5)) is torch.optim.AdamW
    found = create_optimizer({"name": "sgd", "momentum": 0.5}, layer.parameters(), lr=0.1)
    assert type(found) is torch.optim.SGD
    assert (found.defaults["lr"], found.defaults["momentum"]) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("adamw8bits", {}, r"optimizer 'adamw8bits' is unknown\. Did you mean 'adamw8bit'"),
        ({"lr": 1}, {}, r"optimizer '' is unknown\. Accepted: adadelta"),
        ("sgd", {"lrate": 0.1}, r"optimizer 'sgd' does not take 'lrate'\. .*Accepted: dampening"),
    ],
)
def test_what_names_none(spec: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_optimizer(spec, nn.Linear(2, 2).parameters(), **options)


def check_resume(spec: Any) -> dict[str, Any]:
    """A run goes on bit for bit, with the same states. Returns the state of the large weight."""
    whole, again = made(optimizer=spec), made(seed=3, optimizer=spec)
    found = fit(whole)
    options: dict[str, Any] = {"name": "run"}
    fit(made(optimizer=spec), max_epochs=None, max_steps=4, callbacks=ModelCheckpoint(every="4 steps"), **options)
    fit(again, resume_from="latest", callbacks=ModelCheckpoint(every="4 steps"), **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert loss(whole) < 0.7 * loss(made(optimizer=spec))
    state: dict[str, Any] = found.accelerator.preparation.optimizers[0].state[whole.net[2].weight]
    return state


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bitsandbytes_goes_on_bit_for_bit() -> None:
    pytest.importorskip("bitsandbytes")
    state = check_resume("adamw8bit")
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("spec", "kind"), [("adamw8bit_ao", "OptimState8bit"), ("adamwfp8_ao", "OptimStateFp8")])
def test_torchao_goes_on_bit_for_bit(spec: str, kind: str) -> None:
    """In a process of its own: the compiler leaves threads and variables behind."""
    pytest.importorskip("torchao")
    command = [sys.executable, __file__, spec]
    found = subprocess.run(command, check=True, timeout=850, stdout=subprocess.PIPE, text=True)
    assert found.stdout.split()[-1] == kind


if __name__ == "__main__":
    print(type(check_resume(sys.argv[1])["exp_avg"]).__name__)
