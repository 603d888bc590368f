"""The same training with DeepSpeed's ZeRO: its engine by hand, and in Loopwright."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from own_loops import BenchmarkTask, fit
from ticks import Ticker
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Workload

from loopwright.strategies.deepspeed_package import connect_deepspeed, import_deepspeed

# mypy: disable-error-code="no-untyped-call"

CLIP_NORM = 1.0


def stage() -> int:
    """The stage of ZeRO that is timed."""
    return int(os.environ["LOOPWRIGHT_BENCHMARK_STAGE"])


def run_hand_written(work: Workload, ticker: Ticker, steps: int) -> None:
    """What a user would write: an engine with a configuration, and a sampler for each process."""
    device = torch.device("cpu")
    deepspeed = import_deepspeed(device)
    connect_deepspeed(deepspeed, device)  # as in Loopwright, without DeepSpeed's C++ on the CPU
    model, optimizer, loader = work.build(steps * dist.get_world_size())
    num_parameters = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": work.accumulate,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage(), "reduce_bucket_size": num_parameters},
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    sampler = DistributedSampler(loader.dataset, shuffle=work.shuffle)  # type: ignore[arg-type, var-annotated]
    for x, y in DataLoader(loader.dataset, batch_size=work.batch_size, sampler=sampler):
        ticker.tick()
        engine.backward(work.loss(engine(x), y))
        engine.step()
    engine.destroy()


def run_trainer(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers."""
    strategy = {"name": "deepspeed", "zero_stage": stage()}
    fit(
        BenchmarkTask(work, ticker), steps * dist.get_world_size(), strategy=strategy, clip_norm=CLIP_NORM,
        progress=False, trackers=False,
    )  # fmt: skip


def run_accelerator(work: Workload, ticker: Ticker, steps: int) -> None:
    """Loopwright's Accelerator in the user's own loop."""
    from loopwright import Accelerator

    strategy = {"name": "deepspeed", "zero_stage": stage()}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate, strategy=strategy)
    model, optimizer, loader = accelerator.prepare(*work.build(steps * dist.get_world_size()))
    for x, y in loader:
        ticker.tick()
        with accelerator.accumulate(model):
            accelerator.backward(work.loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
