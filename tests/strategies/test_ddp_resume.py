"""What DDP itself brings into a checkpoint: a resumed run averages gradients exactly as the one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.callback import Callback
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

STEPS = 7


class Shuffled(Task):
    """Layers that are used in another order than they are declared, so that DDP's first buckets are not its later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(17, 17) for _ in range(5)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index in (3, 1, 4, 0, 2):
            batch = torch.tanh(self.layers[index](batch))
        return F.mse_loss(batch, torch.ones_like(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class SaveAt(Callback):
    """Saves after one step, and stops there if it is to."""

    def __init__(self, step: int, path: Path, *, stops: bool) -> None:
        self.step, self.path, self.stops = step, path, stops

    def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.step == self.step:
            trainer.save_state(self.path)
            if self.stops:
                trainer.stop("enough")


def _weights(strategy: dict[str, Any], callbacks: list[Callback], resume_from: Path | None = None) -> list[Tensor]:
    data = torch.randn(3 * STEPS, 4, 17, generator=torch.Generator().manual_seed(5))
    task = Shuffled()
    trainer = Trainer(
        max_steps=STEPS, strategy={"name": "ddp", **strategy}, callbacks=callbacks, trackers=False, progress=False
    )
    trainer.fit(task, list(data), resume_from=resume_from)
    return [parameter.detach() for parameter in task.parameters()]


def _is_equal(strategy: dict[str, Any], saved_at: int) -> bool:
    path = Path(f"at-{saved_at}").absolute()
    whole = _weights(strategy, [])
    _weights(strategy, [SaveAt(saved_at, path, stops=True)])
    resumed = _weights(strategy, [], resume_from=path)
    return all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    ("strategy", "saved_at"),
    [
        ({"bucket_cap_mb": 0.001}, 1),
        ({"bucket_cap_mb": 0.001}, 2),
        ({"bucket_cap_mb": 0.001}, 4),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}},
            4,
        ),
        ({"post_local_sgd": 2, "post_local_sgd_period": 3}, 4),
    ],
    ids=["before-the-buckets-are-known", "just-then", "later", "power-sgd", "between-averages"],
)
def test_three_processes_go_on_bit_for_bit(three_processes: Any, strategy: dict[str, Any], saved_at: int) -> None:
    assert three_processes(_is_equal, strategy, saved_at) == [True] * 3
