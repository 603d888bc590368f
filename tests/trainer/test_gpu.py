"""What only an accelerator shows. No GPU was at hand when these were written; all but one ran on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback
from loopwright.distributed.devices import choose_device
from loopwright.distributed.random import set_seed
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu


class Net(Task):
    """A small network with dropout, whose loss is logged at each step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train/loss", loss, progress_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(batches: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, 8, generator=generator) for _ in range(batches)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def trained(task: Net, **options: Any) -> dict[str, Tensor]:
    """The weights, on the host, after two epochs."""
    options = {"max_epochs": 2, "trackers": False, "progress": False} | options
    val = options.pop("val", None)
    Trainer(**options).fit(task, data(), val)
    return {name: value.detach().cpu() for name, value in task.state_dict().items()}


def net(**options: Any) -> Net:
    set_seed(0)
    return Net(**options)


def test_weights_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = trained(net(), accumulate=5, clip_norm=1.0)
    monkeypatch.setenv("LOOPWRIGHT_TORCH_DEVICE", "cpu")
    on_cpu = trained(net(), accumulate=5, clip_norm=1.0)
    for name, value in on_cpu.items():
        torch.testing.assert_close(on_device[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_comes_near(precision: str) -> None:
    device = choose_device()
    # A scale at which no step overflows, so that both take the same steps.
    chosen = (
        ScaledPrecision(device, torch.amp.GradScaler(device.type, init_scale=16.0)) if precision == "fp16" else "bf16"
    )
    exact, mixed = trained(net()), trained(net(), precision=chosen)
    for name, value in exact.items():
        torch.testing.assert_close(mixed[name], value, rtol=0.05, atol=0.05)


def test_nothing_waits_for_the_device_between_records() -> None:
    class Strict(Callback):
        """Makes each wait for the device inside a batch an error."""

        def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    trained(net(), callbacks=Strict(), log_every="7 steps", clip_norm=1.0)


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_batch_arrives_whole_with_one_more_at_most_on_its_way(accumulate: int, pin_memory: bool) -> None:
    """Large batches, each used by a device that is busy for long; the peak of its memory counts them."""
    size = 1 << 22

    class Large(Task):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))
            self.means: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 0:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda._sleep(20_000_000)
            self.means.append(batch.mean())
            return self.w * self.means[-1]

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            torch.cuda._sleep(20_000_000)
            return batch.mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.arange(8.0)[:, None].expand(8, size).contiguous()
    loader: DataLoader[Any] = DataLoader(rows, pin_memory=pin_memory)  # type: ignore[arg-type]
    task, before = Large(), torch.cuda.memory_allocated()
    found = Trainer(max_epochs=1, accumulate=accumulate, trackers=False, progress=False)
    found.fit(task, loader)
    assert torch.stack(task.means).tolist() == list(range(8))
    assert torch.cuda.max_memory_allocated() - before < 2.5 * 4 * size
    assert [float(each) for each in found.predict(task, loader)] == list(range(8))


def test_validation_leaves_no_trace_in_the_devices_random_state() -> None:
    without, with_it = trained(net(dropout=0.5), seed=3), trained(net(dropout=0.5), seed=3, val=data(3))
    for name, value in without.items():
        assert torch.equal(with_it[name], value)


def test_an_overflow_is_a_skipped_step() -> None:
    task, found = net(), Trainer(max_epochs=1, precision="fp16", trackers=False, progress=False)
    found.fit(task, [(torch.full((4, 8), 1e4), torch.zeros(4, 1)), *data(3)])
    assert found.state.skipped_steps >= 1
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
