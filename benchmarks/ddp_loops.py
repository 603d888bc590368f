"""The same training on several processes: by hand with torch's DDP, and in Loopwright."""

from __future__ import annotations

import torch.distributed as dist
from own_loops import BenchmarkTask, fit, run_accelerator
from ticks import Ticker
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Workload

# mypy: disable-error-code="no-untyped-call"


def run_hand_written(work: Workload, ticker: Ticker, steps: int) -> None:
    """What a user would write: a sampler for each process, DDP, and `no_sync` on all but the last batch of a window."""
    model, optimizer, loader = work.build(steps * dist.get_world_size())
    sampler = DistributedSampler(loader.dataset, shuffle=work.shuffle)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(loader.dataset, batch_size=work.batch_size, sampler=sampler)
    replica = DistributedDataParallel(model)
    loss_function, accumulate = work.loss, work.accumulate
    for index, (x, y) in enumerate(loader, start=1):
        ticker.tick()
        if index % accumulate:
            with replica.no_sync():
                (loss_function(replica(x), y) / accumulate).backward()
            continue
        (loss_function(replica(x), y) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_accelerator_ddp(work: Workload, ticker: Ticker, steps: int) -> None:
    """Loopwright's Accelerator in the user's own loop."""
    run_accelerator(work, ticker, steps * dist.get_world_size())


def run_trainer_ddp(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers."""
    _fit_on_all(BenchmarkTask(work, ticker), steps)


def run_trainer_ddp_log(work: Workload, ticker: Ticker, steps: int) -> None:
    """The Trainer without bar and trackers, with `self.log` in each step."""
    _fit_on_all(BenchmarkTask(work, ticker, {}), steps)


def _fit_on_all(task: BenchmarkTask, steps: int) -> None:
    fit(task, steps * dist.get_world_size(), strategy="ddp", progress=False, trackers=False)
