"""What the processes of test_pipeline_faults.py run: a pipeline in which one of them fails on purpose.

`failing_pipeline.py KIND INDEX COPIES`: process INDEX does it in the fourth batch, in the place that KIND names.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import EndEpoch, SkipBatch, StopRun

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests are no package of an installation

from tests.strategies.pipelined import GPT, fit, loader

BATCH = 3
RANK = int(os.environ.get("RANK", "0"))


class Backward(torch.autograd.Function):
    """Gives its input, and fails when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("boom in the backward")


class Fails(nn.Module):
    """A layer of each stage that fails in one process."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_armed = kind, False

    def forward(self, value: Tensor) -> Tensor:
        if not self.is_armed:
            return value
        match self.kind:
            case "forward":
                raise ZeroDivisionError("boom in the forward")
            case "backward":
                failing: Tensor = Backward.apply(value)  # type: ignore[no-untyped-call]
                return failing
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop-inside":
                raise StopRun("enough")
            case "skip-inside":
                raise SkipBatch
            case "shape":
                return value[:1]
        return value


class Failing(GPT):
    def __init__(self, kind: str, is_chosen: bool) -> None:
        super().__init__()
        self.kind, self.is_chosen = kind, is_chosen
        self.first, self.second = Fails(kind), Fails(kind)

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.input, self.blocks[0], self.first, *self.blocks[1:], self.second, self.norm, self.head]

    def pipeline_loss(self, output: Tensor, batch: Any) -> Any:
        if self.second.is_armed and self.kind == "loss":
            raise ZeroDivisionError("boom in the loss")
        return super().pipeline_loss(output, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == BATCH and self.is_chosen:
            self.first.is_armed = self.second.is_armed = True
            match self.kind:
                case "step":
                    raise ZeroDivisionError("boom in the step")
                case "stop":
                    raise StopRun("enough")
                case "end-epoch":
                    raise EndEpoch
                case "uneven":
                    batch = [batch[0][:3]]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "validation" and self.is_chosen and batch_idx == 1:
            raise ZeroDivisionError("boom in the validation")
        super().validation_step(batch, batch_idx)


def main(kind: str, index: int, copies: int) -> None:
    torch.set_num_threads(1)
    is_chosen = index in (RANK, -1)
    strategy = {"name": "pipeline", "split": ["blocks.1"], "copies": copies}
    trainer = fit(
        Failing(kind, is_chosen), loader(24 * copies, 4), loader(8 * copies, 4), strategy=strategy, max_epochs=2,
        accumulate=2, process_timeout=120, val_every=3, sanity_val_batches=0,
    )  # fmt: skip
    print(f"ended at step {trainer.state.step}, epoch {trainer.state.epoch}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
