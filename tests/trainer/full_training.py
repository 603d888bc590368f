"""What the processes of test_splitting_together.py run by themselves: `full_training.py KIND`.

`sample`: not even one sample fits on process 1. `full`: its memory is bounded, so that a pass of 64 samples does not
fit; the weights have to be those of a run without a bound.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

WIDTH = 200_000


class Wide(Task):
    """A layer whose activations take far more memory than its weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch))
        if self.kind == "sample" and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss: Tensor = self.last(torch.tanh(self.first(batch))).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def bound(more: int) -> None:
    """Let this process have so many bytes more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, -1))


def train(kind: str, bounded: bool) -> tuple[list[Tensor], Any, Wide]:
    """Whole weights, on process 0; the size of parts; the task."""
    task = Wide(kind)
    trainer = Trainer(
        max_epochs=1, auto_accumulate=True, trackers=False, progress=False, strategy={"name": "fsdp", "wrap": "Linear"}
    )
    source = torch.Generator().manual_seed(0)
    if bounded and os.environ["RANK"] == "1":
        bound(150 * 2**20)
    loader = torch.utils.data.DataLoader(torch.randn(256, 4, generator=source), batch_size=64)  # type: ignore[arg-type,var-annotated]
    trainer.fit(task, loader)
    state = trainer.strategy.whole_model_state(trainer._newest("test").model)
    return [each.clone() for each in state.values()], trainer.part_size, task


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "sample":
        train(kind, bounded=False)
        return
    wanted, size, task = train(kind, bounded=False)
    assert size is None, size
    assert task.sizes == [64, 64], task.sizes
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, size, task = train(kind, bounded=True)
    assert 1 <= size <= 32, size
    if os.environ["RANK"] == "1":
        assert "can't allocate memory" in str(said[0].message), said[0].message
    assert max(task.sizes[-4:]) == size, task.sizes
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main(sys.argv[1])
